"""The local executor: every post is in this process, reached by plain calls. The learner's post works on the driver's
own thread, while the driver waits. Separated rollout has a thread and its own copy of the weights, and works beside the
others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.cluster.assignment import DockDoor
from tidemill.cluster.commands import HostCommands, Request
from tidemill.cluster.report import Answer
from tidemill.cluster.wiring import Post, Resources, Wiring
from tidemill.cluster.worker.host import Host
from tidemill.data.survey import open_rows
from tidemill.dock import Dock
from tidemill.dock.address import Address
from tidemill.flow.evaluate import decoder, evaluate, play
from tidemill.flow.feed import encoder_of
from tidemill.flow.records import Activity, Evaluation
from tidemill.graph import Graph
from tidemill.models.load import LoadedModel
from tidemill.recipe.config import Config
from tidemill.reward.score import Scorer
from tidemill.serve.make import close_engine, make_engine

if TYPE_CHECKING:
    from tidemill.cluster.driver.run_dock import RunDock
    from tidemill.flow.dump import Dump

SLICE_S = 0.02  # of work before the driver checks the step's progress
REPORT_S = 1.0  # a worker reports at least this often: decoding is progress
IDLE_S = (0.0005, 0.004)  # pause between polls when all wait for another thread or process: at first, at most


class LocalHandle:
    """A worker in this process. What it raises is raised here."""

    def __init__(self, name: str, has_thread: bool) -> None:
        self.host = Host(name)
        self._watching: tuple[int, Future[Any]] | None = None
        if has_thread:
            self.host.start()

    def call(self, request: Request[Any]) -> Future[Any]:
        if request.name == HostCommands.watch.__name__:
            return self._watch(*request.args)
        done: Future[Any] = Future()
        if request.is_direct:
            done.set_result(Answer(request.run(self.host)))
            return done
        told = self.host.give(request)
        if not self.host.has_thread:
            self.host.run_once()
            done.set_result(Answer(told.result()))
            return done
        told.add_done_callback(lambda _: _pass_on(told, done))
        return done

    def _watch(self, seen: int, _: float) -> Future[Any]:
        future: Future[Any] = Future()
        self._watching = seen, future
        return future

    def tell(self, is_due: bool) -> None:
        """Report to the driver if something happened since, or because it is time."""
        if self._watching is not None and (is_due or self._watching[0] != self.host.serial):
            (_, future), self._watching = self._watching, None
            future.set_result(Answer(self.host.report()))

    def kill(self) -> None:
        self.host.close()


def _pass_on(told: Future[Any], done: Future[Any]) -> None:
    error = told.exception()
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(Answer(told.result()))


class LocalStarter:
    home = ("node0", "127.0.0.1")
    address = ""
    is_here = True
    has_processes = False
    watch_s = REPORT_S

    def __init__(self) -> None:
        self._handles: list[LocalHandle] = []
        self._told = 0.0
        self._idle_s = IDLE_S[0]
        self.is_stuck = False

    def spawn(self, post: Post, logs: Path) -> LocalHandle:
        made = LocalHandle(post.name, has_thread=not post.group.learns)
        self._handles.append(made)
        return made

    def now(self) -> float:
        return time.monotonic()

    def open_dock(self, config: Config, graph: Graph, folder: Path, dump: Dump | None) -> RunDock:
        from tidemill.cluster.driver.run_dock import OwnRunDock

        return OwnRunDock(config, graph, dump)

    def work(self, wait_s: float) -> float:
        """Poll workers without a thread until nothing moves, or one has something to report; return to the driver now
        and then."""
        own = [h.host for h in self._handles if not h.host.has_thread]
        until = time.monotonic() + SLICE_S
        moved, reported = False, [host.serial for host in own]
        while sum(host.run_once() for host in own):
            moved = True
            if time.monotonic() > until or [host.serial for host in own] != reported:
                break
        self._raise_errors()
        is_due = (now := time.monotonic()) - self._told > REPORT_S
        self._told = now if is_due else self._told
        for handle in self._handles:
            handle.tell(is_due)
        has_threads = len(own) < len(self._handles)
        is_waiting = has_threads or any(host.worker is not None and host.worker.waits for host in own)
        self.is_stuck = not moved and not is_waiting
        if moved:
            self._idle_s = IDLE_S[0]
        elif is_waiting and wait_s:
            time.sleep(min(self._idle_s, wait_s))
            self._idle_s = min(2 * self._idle_s, IDLE_S[1])
        return 0.0

    def _raise_errors(self) -> None:
        for handle in self._handles:
            if handle.host.error is not None:
                raise handle.host.error

    def nodes(self) -> Sequence[Resources]:
        return []

    def reserve(self, wiring: Wiring) -> None:
        """Do nothing: all posts share this process's resources."""

    def release(self, post: Post) -> None:
        """Do nothing: nothing was reserved."""

    def store(self, node: str, host: str, dock: Address, memory_mb: int | None) -> bool:
        return False  # the dock's bytes are on the heap

    def lost_stores(self) -> list[str]:
        return []

    def describe(self) -> str:
        return "this process"

    def close(self) -> None:
        """Do nothing: workers have ended already."""


class OwnDock:
    """Implements `DockPlace` for a dock of this process."""

    ledger = "here"

    def __init__(self, dock: Dock) -> None:
        self.dock = dock

    def connect(self, node: str) -> DockDoor:
        return DockDoor(self.dock, self.dock.close)


def evaluate_trained(
    loaded: LoadedModel,
    config: Config,
    *,
    size: int,
    samples: int,
    tell: Callable[[Activity], None] = lambda activity: None,
) -> Evaluation:
    """Evaluate a model that is not being trained."""
    if config.model.policy is not None:
        return play(make_engine(loaded, config), size, tell)
    _, held_out = open_rows(config)
    encode, decode = (
        encoder_of(config, loaded.tokenizer),
        decoder(loaded.tokenizer),
    )
    with Scorer(config.rewards, device=config.device) as scorer:
        engine = make_engine(loaded, config)
        try:
            return evaluate(engine, held_out, encode, decode, scorer, config, size=size, samples=samples, tell=tell)
        finally:
            close_engine(engine)
