"""The world of a simulation, and the starter that gives it to the driver: workers, dock and clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.algorithms.shared import registry
from tidemill.cluster.assignment import DockDoor
from tidemill.cluster.driver.worker_pool import Member
from tidemill.cluster.report import Answer, MoveReport
from tidemill.cluster.wiring import Post, Resources, Wiring
from tidemill.dock.address import Address
from tidemill.dock.local import LocalDock
from tidemill.estimate.ranks_memory import engine_share
from tidemill.flow.schedule import staleness_limit
from tidemill.flow.tally import Counted
from tidemill.graph import Graph
from tidemill.plan.lengths import Lengths
from tidemill.plan.simulate.collect import Timeline
from tidemill.plan.simulate.failures import Faults, speed_factor
from tidemill.plan.simulate.kernel import FOREVER, Kernel
from tidemill.plan.simulate.mirror import Mirror
from tidemill.plan.simulate.parts import Book, LengthBook
from tidemill.plan.simulate.promise import DONE, Promise
from tidemill.plan.simulate.shared import Share, Unshared
from tidemill.plan.simulate.worker import SimulatedWorker
from tidemill.plan.time_model import TimeModel
from tidemill.recipe.config import Config

if TYPE_CHECKING:
    from tidemill.flow.dump import Dump

DISK_BYTES_PER_S = 2e9  # of each rank, for a checkpoint
MANY = 64  # devices from which an engine's samples are followed by whole groups


class World:
    """What all simulated workers of a run share."""

    def __init__(
        self,
        model: TimeModel,
        lengths: Lengths,
        faults: Faults,
        seed: int,
        groups_only: bool | None = None,
        book: Book | None = None,
    ) -> None:
        self.model, self.config, self.faults = model, model.config, faults
        self.kernel = Kernel()
        self.graph = model.graph
        self.algorithm = registry.of(model.config)
        self.book = book or LengthBook(lengths, model.config.train.samples_per_prompt, seed)
        cores = model.machines.cores
        self.cores: Share | Unshared = Share(self.kernel, cores) if cores else Unshared()
        self.timeline = Timeline()
        self.peers = max(1, model.engines)
        self.saved: dict[str, dict[str, Any]] = {}
        self.hosts: dict[str, SimulatedWorker | Mirror] = {}
        self.workers: dict[str, SimulatedWorker] = {}  # those of the hosts that decide
        self.groups_only = model.devices >= MANY if groups_only is None else groups_only
        self.done, self.nothing_counted = DONE, Promise(Answer((Counted({}, {}, []), [])))
        self.nothing_taken = Promise(Answer(0))
        self.has_heard = False
        self.dock: SimulatedDock | None = None
        self._rng = random.Random(seed)
        self._speeds: dict[str, float] = {}
        self._started: set[str] = set()
        self._resting: dict[str, dict[SimulatedWorker, None]] = {}
        self._moving: Promise | None = None
        self._look_due = 0.0
        shape, learn = model.shape, model.config.learn
        held = (0.02 if learn.lora_rank else 1.0) * shape.total * 3 * model.width
        self.save_s = held / max(1, model.learners) / DISK_BYTES_PER_S

    # Who is where

    def place_of(self, post: Post) -> tuple[str, str]:
        per_node = max(1, self.model.machines.per_node)
        first = self.model.learners if not post.group.learns else 0
        return f"node{(first + post.rank) // per_node}", "127.0.0.1"

    def speed_of(self, post: Post) -> float:
        if post.name not in self._speeds:
            f = self.faults
            self._speeds[post.name] = speed_factor(self._rng, f.spread, f.slow_share, f.slow_factor)
        return self._speeds[post.name]

    def slowest(self) -> float:
        """Ranks that learn together go at the pace of the slowest."""
        own = [self._speeds[name] for name in self._speeds if name.startswith("learner-")]
        return max(own, default=1.0)

    def start_s(self, post: Post) -> float:
        """Whoever comes for the first time is there at once: a run's time counts from when all are up."""
        is_new = post.name not in self._started
        self._started.add(post.name)
        return 0.0 if is_new else self.faults.restart_s

    @property
    def first_learner(self) -> SimulatedWorker | None:
        return self.workers.get("learner-0")

    @property
    def version(self) -> int:
        first = self.first_learner
        return first.learner.version if first is not None and first.learner is not None else 0

    # Hearing

    def heard(self) -> None:
        self.has_heard = True

    def learned(self, group: int) -> None:
        """All learners say so, as one."""
        for host in self.hosts.values():
            if host.post.group.learns:
                host.tell(group)
        self.heard()

    # Moving weights

    def publish_s(self) -> float:
        return self.model.publish_s * self.faults.network(self._rng)

    def moved_bytes(self, post: Post) -> float:
        return (
            0.0 if post.group.learns else engine_share(self.model.config, self.model.shape, self.model.engine_grid)[0]
        )

    def moving(self) -> Promise:
        """One answer for all who only send or receive."""
        if self._moving is None or self._moving.done():
            promise = self._moving = Promise()
            report = Answer(MoveReport(0, 0, self.model.publish_s))

            def moved() -> None:
                promise.answer(report)
                self.heard()

            self.kernel.after(self.publish_s(), moved)
        return self._moving

    # The dock

    def resting(self, worker: SimulatedWorker) -> None:
        for stage in worker.open:
            self._resting.setdefault(stage, {})[worker] = None

    def working(self, worker: SimulatedWorker) -> None:
        for stage in worker.open:
            self._resting.get(stage, {}).pop(worker, None)

    def changed(self, stages: set[str], ready: Callable[[str], int]) -> None:
        """Rows have come for these stages: as many who rest there as there are rows look again."""
        for stage in stages:
            resting = self._resting.get(stage)
            if resting:
                for worker in list(resting)[: max(1, ready(stage))]:
                    resting.pop(worker, None)
                    if worker.task is not None:
                        worker.task.wake()
        for worker in list(self._resting.get("learn", ())):
            if worker.task is not None:
                worker.task.wake()

    def looks_for_stragglers(self) -> bool:
        """Of many who have nothing to do, one looks whether another is late."""
        if self.kernel.time < self._look_due:
            return False
        self._look_due = self.kernel.time + 0.4
        return True

    def lost_leases(self, leases: list[Any]) -> None:
        if leases and self.dock is not None:
            dock, after = self.dock, self.config.cluster.lease_s * self._rng.uniform(0.75, 1.0)
            self.kernel.after(after, lambda: dock.expire_leases(leases))

    def gone(self, host: SimulatedWorker | Mirror) -> None:
        name = host.post.name
        worker = self.workers.get(name)
        if worker is not None and worker is host:
            del self.workers[name]
            for resting in self._resting.values():
                resting.pop(worker, None)
        if self.hosts.get(name) is host:
            del self.hosts[name]


class SimulatedDock(LocalDock):
    """The dock of one process on the simulation's clock. Leases last while their workers do."""

    def __init__(self, world: World) -> None:
        config, graph = world.config, world.graph
        self._world = world
        super().__init__(
            graph.stages,
            source=graph.source,
            lease_s=FOREVER,
            max_staleness=staleness_limit(config),
            stale="requeue",
            clock=world.kernel.now,
        )

    def _settle(self) -> None:
        touched = set(self._ledger.touched)
        super()._settle()
        self._world.changed(touched, lambda stage: self._ledger.controller(stage).ready.count)

    def expire_leases(self, leases: list[Any]) -> None:
        """A worker that ended renews nothing: its leases run out."""
        with self._lock:
            now = self._clock()
            for lease in leases:
                key = lease._grant.lease
                if key in self._ledger.leases:
                    self._ledger.leases[key].deadline = now
            self._ledger.leases.look_again()
            self._expire(now)


class SimulatedRunDock:
    """Implements `RunDock`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._number = 0
        self._open()

    def _open(self) -> None:
        self._number += 1
        self.dock = self.world.dock = SimulatedDock(self.world)
        self.place = SimulatedPlace(f"dock-{self._number}", self.dock)

    def store(self, member: Member) -> None:
        """Bytes are not simulated one by one."""

    def lose(self, node: str) -> None: ...

    def renew(self) -> None:
        self.dock.close()
        self._open()

    def close(self) -> None:
        self.dock.close()


class SimulatedPlace:
    """Implements `DockPlace`."""

    def __init__(self, ledger: str, dock: SimulatedDock) -> None:
        self.ledger, self.dock = ledger, dock

    def connect(self, node: str) -> DockDoor:
        return DockDoor(self.dock, lambda: None)


class SimulatedStarter:
    """Implements `Starter`."""

    home = ("node0", "127.0.0.1")
    address = ""
    is_here = False
    has_processes = False
    is_stuck = False
    watch_s = FOREVER

    def __init__(self, world: World) -> None:
        self.world = world

    def now(self) -> float:
        return self.world.kernel.time

    def work(self, wait_s: float) -> float:
        """Virtual time passes: to what the driver hears next, in the driver's own steps of waiting."""
        kernel, world = self.world.kernel, self.world
        world.has_heard = False
        end = kernel.time + wait_s
        if wait_s > 0 and kernel.next_time > end and kernel.next_time < FOREVER and not self._is_mending():
            end += int((kernel.next_time - end) / wait_s) * wait_s  # looks between would see what this one saw
        kernel.run(end, lambda: world.has_heard)
        return 0.0

    def _is_mending(self) -> bool:
        return len(self.world.hosts) < self._posts

    _posts = 0

    def open_dock(self, config: Config, graph: Graph, folder: Path, dump: Dump | None) -> SimulatedRunDock:
        return SimulatedRunDock(self.world)

    def nodes(self) -> Sequence[Resources]:
        return []

    def reserve(self, wiring: Wiring) -> None:
        self._posts = len(wiring.posts)

    def spawn(self, post: Post, logs: Path) -> SimulatedWorker | Mirror:
        rolls_out = post.group.has_engine and post.leads
        decides = post.rank == 0 if post.group.learns else post.leads and bool(post.stages)
        is_first = decides or rolls_out or post.feeds
        made: SimulatedWorker | Mirror
        if is_first:
            made = self.world.workers[post.name] = SimulatedWorker(self.world, post)
        else:
            made = Mirror(self.world, post)
        self.world.hosts[post.name] = made
        self.world.faults.born(self.world, made)
        return made

    def release(self, post: Post) -> None:
        """Its place is kept."""

    def store(self, node: str, host: str, dock: Address, memory_mb: int | None) -> bool:
        return False

    def lost_stores(self) -> list[str]:
        return []

    def describe(self) -> str:
        return "a simulation"

    def close(self) -> None:
        for host in list(self.world.hosts.values()):
            host.kill()
