"""Runs workers through Ray. Ray places and starts processes and reports when one ends; no sample and no weight passes
through it. Without an address, a Ray for this run alone is started, in a folder of its own, and ends with it."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tidemill import owned
from tidemill.cluster.commands import HostCommands, Request
from tidemill.cluster.driver import status
from tidemill.cluster.driver.placement import PlacementError
from tidemill.cluster.report import Answer, Numbers
from tidemill.cluster.start.forkserver import Forks, environment
from tidemill.cluster.start.handle import Elsewhere, WorkerLost
from tidemill.cluster.wiring import ROLLOUT, Post, Resources, Wiring
from tidemill.dock.address import Address
from tidemill.errors import ConfigError, MissingExtra, TidemillError
from tidemill.recipe.config import Cluster

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
except ImportError:
    raise MissingExtra("cluster.executor=ray", "ray", "cluster") from None

RESERVE_S = 60.0  # waiting time for a placement that fits, so that others may end first
OBJECT_STORE_BYTES = 80 << 20  # nothing of ours is stored in it
THREADS = 16  # concurrent calls to one worker


class RayHost:
    """An actor that stands for a worker: Ray gives it a place, and devices through its environment; the worker
    itself is forked on the same node."""

    def __init__(self, name: str, logs: str, forks: str) -> None:
        self._worker = Forks(Path(forks)).spawn(name, Path(logs))
        self._stacks = Path(logs) / f"{name}.stacks"

    def answer(self, request: Request[Any], number: int) -> Answer:
        if request.name == HostCommands.where.__name__:
            return Answer((ray.get_runtime_context().get_node_id(), own_address()))
        if request.name == HostCommands.look.__name__:  # from outside, because the worker may not be able to answer
            return Answer(status.stacks_of(self._worker.pid, self._stacks))
        told: Answer = self._worker.pass_on(request, number).result()
        return told


class Storehouse:
    """A node's warehouse, and the actor that watches it."""

    def __init__(self, address: Address, node: str, host: str, memory_mb: int | None) -> None:
        from tidemill.dock.server import DockNode

        memory: dict[str, Any] = {} if memory_mb is None else {"memory_bytes": memory_mb << 20}
        self.node = DockNode(address, node, host, **memory)

    def pid(self) -> int:
        return self.node.warehouse.pid

    def stay(self) -> None:
        """Never return: the caller notices the end of this process."""
        threading.Event().wait()


class RayStarter(Elsewhere):
    def __init__(self, settings: Cluster, name: str, forks: Forks, posts: Callable[[], int]) -> None:
        self.settings, self.name, self._forks, self._posts = settings, name, forks, posts
        self._is_own = False
        self._folder: Path | None = None
        self._environment: dict[str, Any] = {"runtime_env": {"env_vars": environment()}}  # of each worker
        self._connect()
        remote: Any = ray.remote  # its types cover functions only
        self._actor = remote(max_concurrency=THREADS, max_restarts=0, num_cpus=0)(RayHost)
        self._storehouse = remote(num_cpus=0, max_restarts=0, max_concurrency=2)(Storehouse)
        self._groups: dict[str, Any] = {}  # placement groups, by group or by post
        self._ranks: dict[str, set[str]] = {}  # of an engine with several ranks: those that were started
        self._stores: dict[tuple[str, str], Any] = {}  # by node and dock
        self._ended: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        context = ray.get_runtime_context()
        self.home = (context.get_node_id(), own_address())

    def _join(self, quiet: dict[str, Any]) -> None:
        """Connect to a cluster that runs. For `ray://` Ray first starts a server for this client, which on a busy
        machine may miss Ray's own deadline: then once more."""
        for is_last in (False, False, True):
            try:
                ray.init(address=self.settings.address, namespace=f"tidemill-{self.name}", **quiet)
                return
            except (ConnectionError, ValueError, RuntimeError) as error:
                if isinstance(error, ConnectionAbortedError) and not is_last:
                    continue
                raise ConfigError(
                    f"cluster.address={self.settings.address}: {first_line(error)}",
                    "`ray start --head` starts a cluster; cluster.address=local one for this run alone",
                ) from error

    def _connect(self) -> None:
        if ray.is_initialized():  # initialised by the caller, for example a test
            return
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
        if self.settings.address != "local":
            self._join(quiet)
        else:
            self._folder = owned.make()
            self._owner = owned.own(self._folder)
            # Nodes get our environment from the start, so that processes which Ray starts ahead of need can be used.
            before = {name: os.environ.get(name) for name in environment()}
            os.environ |= environment()
            self._environment = {}
            try:
                ray.init(
                    address="local",
                    namespace=f"tidemill-{self.name}",
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    _temp_dir=str(self._folder),
                    num_cpus=self._cpus(),
                    **quiet,
                )
            finally:
                for name, value in before.items():
                    if value is None:
                        del os.environ[name]
                    else:
                        os.environ[name] = value
        self._is_own = True

    def _cpus(self) -> int:
        """Return the CPUs to declare: at least as many places as workers, which share the cores. Ray starts a
        process for each ahead of need, about a second of work, so there is none to spare."""
        return max(os.cpu_count() or 1, int(self._posts() * self.settings.cpus + 0.999))

    # Resources

    def nodes(self) -> Sequence[Resources]:
        shown = ("CPU", "GPU", "NPU")
        alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        return [{name: node["Resources"].get(name, 0.0) for name in shown} for node in alive]

    @property
    def address(self) -> str:
        return str(ray.get_runtime_context().gcs_address)

    def describe(self) -> str:
        return f"Ray at {self.address}"

    def reserve(self, wiring: Wiring) -> None:
        for group in wiring.groups:
            if group.name == ROLLOUT and group.engine_ranks > 1:  # the ranks of an engine close together
                for post in group.posts:
                    self._place_of(post)
                continue
            strategy = "SPREAD" if self.settings.spread and not group.learns else "PACK"
            self._groups[group.name] = placement_group([dict(group.needs)] * group.ranks, strategy=strategy)
        for name, reserved in self._groups.items():
            if not reserved.wait(RESERVE_S):
                raise PlacementError(
                    f"Ray did not find room for {len(reserved.bundle_specs)} × {name} within {RESERVE_S:g} s: "
                    "others may be using it",
                    "wait for them, or ask for less: cluster.learners, rollouts, rewards, cpus",
                )

    def _place_of(self, post: Post) -> tuple[Any, int]:
        """Return the placement group of a post, and its bundle there; make one for a post that joined later."""
        shared, needs = self._groups.get(post.group.name), dict(post.group.needs)
        if shared is not None and post.name not in self._groups and post.rank < len(shared.bundle_specs):
            return shared, post.rank
        parts = post.group.engine_ranks if post.group.name == ROLLOUT else 1
        own = _engine_name(post) if parts > 1 else post.name
        if own not in self._groups:
            self._groups[own] = placement_group([needs] * parts, strategy="PACK")
        return self._groups[own], post.part if parts > 1 else 0

    # Processes

    def spawn(self, post: Post, logs: Path) -> RayHandle:
        group, index = self._place_of(post)
        self._ranks.setdefault(_engine_name(post), set()).add(post.name)
        needs = dict(post.group.needs)
        cpus, devices = needs.pop("CPU", 0.0), needs.pop("GPU", 0.0)
        actor = self._actor.options(
            num_cpus=cpus,
            num_gpus=devices,
            resources=needs,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            **self._environment,
        ).remote(post.name, str(logs), str(self._forks.path))
        return RayHandle(post.name, actor)

    def release(self, post: Post) -> None:
        name = post.name
        if post.group.engine_ranks > 1:  # its ranks keep their place until the last has left
            name = _engine_name(post)
            self._ranks.get(name, set()).discard(post.name)
            if self._ranks.get(name):
                return
        own = self._groups.pop(name, None)  # a post that joined later; the others keep their places
        if own is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(own)

    def store(self, node: str, host: str, dock: Address, memory_mb: int | None) -> bool:
        """Start a warehouse on a node. The home node's belongs to the dock already."""
        if node == self.home[0] or (node, dock.ledger) in self._stores:
            return False
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        made = self._storehouse.options(scheduling_strategy=where, **self._environment)
        actor = made.remote(dock, node, host, memory_mb)
        try:
            ray.get(actor.pid.remote(), timeout=self.settings.start_s)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise TidemillError(f"no warehouse could be started on {host}: {first_line(error)}") from error
        self._stores = {
            key: made for key, made in self._stores.items() if key[1] == dock.ledger
        }  # other placements end here
        self._stores[node, dock.ledger] = actor
        stays = actor.stay.remote().future()
        stays.add_done_callback(lambda _: self._ended.put((node, dock.ledger)))
        return True

    def lost_stores(self) -> list[str]:
        lost = []
        while not self._ended.empty():
            key = self._ended.get()
            if self._stores.pop(key, None) is not None:
                lost.append(key[0])
        return lost

    def close(self) -> None:
        for group in self._groups.values():
            with contextlib.suppress(Exception):
                remove_placement_group(group)
        self._stores.clear()
        if self._is_own:
            ray.shutdown()
        self._forks.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._owner)


class RayHandle:
    def __init__(self, name: str, actor: Any) -> None:
        self.name, self._actor, self._numbers = name, actor, Numbers()

    def call(self, request: Request[Any]) -> Future[Any]:
        answered: Future[Any] = Future()
        try:
            told = self._actor.answer.remote(request, self._numbers.next(request.is_direct)).future()
        except Exception as error:
            answered.set_exception(WorkerLost(first_line(error)))
            return answered

        def pass_on(done: Future[Any]) -> None:
            error = done.exception()
            if error is not None:
                answered.set_exception(WorkerLost(why(error)))
            else:
                answered.set_result(done.result())

        told.add_done_callback(pass_on)
        return answered

    def kill(self) -> None:
        with contextlib.suppress(Exception):
            ray.kill(self._actor, no_restart=True)


def _engine_name(post: Post) -> str:
    """The post of the engine's first rank."""
    return f"{post.group.name}-{post.rank - post.part}"


def own_address() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def why(error: BaseException) -> str:
    """Shorten Ray's error to one line, without its advice: the worker's log has the rest."""
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, WorkerLost):
        return first_line(error.cause)
    if isinstance(error, ray.exceptions.ActorDiedError | ray.exceptions.ActorUnavailableError):
        text = str(error)
        for sign, words in (("SIGKILL", "its process was killed"), ("node", "its node or process ended")):
            if sign in text:
                return words
        return "its process ended"
    return first_line(error)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


__all__ = ["Answer", "RayHandle", "RayStarter"]
