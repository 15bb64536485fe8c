"""A simulated worker: a host whose stages are the real ones, with a model of time where models would be."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from tidemill.cluster.commands import OpenedStep, Request
from tidemill.cluster.report import Answer, Failure, MoveReport, StoreAddress, WorkerReady, WorkerReport
from tidemill.cluster.start.handle import WorkerLost
from tidemill.cluster.wiring import Post
from tidemill.dock import Dock
from tidemill.flow.ahead import Ahead
from tidemill.flow.stages.every_step import EveryStep
from tidemill.flow.stages.learning import LearnWorker
from tidemill.flow.stages.rolling import RolloutWorker
from tidemill.flow.stages.scoring import AdvantageWorker, ScoreWorker
from tidemill.flow.stages.stage import Worker
from tidemill.flow.tally import Tally
from tidemill.plan.decoding import DecodingClock
from tidemill.plan.simulate.kernel import FOREVER, Task
from tidemill.plan.simulate.parts import (
    SimulatedAlgorithm,
    SimulatedEngine,
    SimulatedFeed,
    SimulatedLearner,
    SimulatedReward,
    made_columns,
)
from tidemill.plan.simulate.promise import NOTHING, Promise
from tidemill.reshard.layouts.layout import Layout

if TYPE_CHECKING:
    from tidemill.plan.simulate.starter import World

IDLE_S = (0.001, 0.02)  # as a real worker waits between looks when nothing moves
LOOK_S = 0.5  # for stragglers, by who has nothing to do
EMPTY = Layout(())


class SimulatedWorker:
    """Implements `Handle`. Commands are carried out in order, between two pieces of work, as a real one's are."""

    def __init__(self, world: World, post: Post) -> None:
        self.world, self.post = world, post
        self.kernel = world.kernel
        self.speed = world.speed_of(post)
        self.tally = Tally(self.kernel.now)
        self.open: tuple[str, ...] = ()
        self.workers: dict[str, Worker] = {}
        self.rollout: RolloutWorker | None = None
        self.engine: SimulatedEngine | None = None
        self.learn: LearnWorker | None = None
        self.learner: SimulatedLearner | None = None
        self.feed: SimulatedFeed | None = None
        self.ahead: Ahead | None = None
        self.dock: Dock | None = None
        self.leases: weakref.WeakSet[Any] = weakref.WeakSet()
        self.serial = self.moves = 0
        self.doing = ""
        self.owed = 0.0  # seconds of calls that the next piece of work takes with it
        self.error: BaseException | None = None
        self._commands: deque[tuple[Request[Any], Promise]] = deque()
        self._watching: tuple[int, Promise] | None = None
        self._pending: set[Promise] = set()
        self._idle_since = 0.0
        self.task: Task | None = None
        self.is_dead = False
        self._told = -1  # of a learner that follows: the step that the first has ended
        self._follows = post.group.learns and post.rank > 0

    # A handle

    def call(self, request: Request[Any]) -> Any:
        if self.is_dead:
            gone = Promise()
            gone.fail(WorkerLost("its process has ended"))
            return gone
        if request.name == "watch":
            return self._watch(int(request.args[0]))
        if request.is_direct:
            return self._direct(request)
        promise = Promise()
        self._pending.add(promise)
        delay = self.world.model.overheads.command_s
        self.kernel.after(delay / 2, lambda: self._arrives(request, promise))
        return promise

    def _arrives(self, request: Request[Any], promise: Promise) -> None:
        self._commands.append((request, promise))
        if self.task is not None:
            self.task.wake()

    def _direct(self, request: Request[Any]) -> Promise:
        promise = Promise()
        match request.name:
            case "where":
                promise.answer(Answer(self.world.place_of(self.post)))
            case "build":
                self.kernel.after(self.world.start_s(self.post), lambda: self._built(request.args[0], promise))
                self._pending.add(promise)
            case "receive":
                self.kernel.after(self.world.publish_s(), lambda: self._answered(promise, self._moved()))
                self._pending.add(promise)
            case _:
                promise.answer(Answer("" if request.name in ("stacks", "look") else None))
        return promise

    def _moved(self) -> MoveReport:
        return MoveReport(int(self.world.moved_bytes(self.post)), 0, self.world.model.publish_s)

    def _answered(self, promise: Promise, value: Any = None, failure: Failure | None = None) -> None:
        self._pending.discard(promise)
        promise.answer(NOTHING if value is None and failure is None else Answer(value, failure))
        self.world.heard()

    def _built(self, task: Any, promise: Promise) -> None:
        if self.is_dead:
            return
        self.connect(task.dock)
        self.make_workers()
        self.task = Task(self.kernel, self._run, self._failed)
        self._answered(promise, WorkerReady(0, "here"))

    def kill(self) -> None:
        """The process ends: whoever asked it something hears so, and what it held runs out."""
        if self.is_dead:
            return
        self.is_dead = True
        if self.task is not None:
            self.task.kill()
        self.world.lost_leases(list(self.leases))
        waiting = [*self._pending, *([self._watching[1]] if self._watching else [])]
        for promise in waiting:
            promise.fail(WorkerLost("its process has ended"))
        self._pending.clear()
        self.world.gone(self)

    def _watch(self, seen: int) -> Promise:
        promise = Promise()
        if self.serial != seen:
            promise.answer(Answer(self.report()))
        else:
            self._watching = seen, promise
        return promise

    def say(self) -> None:
        self.serial += 1
        if self._watching is not None:
            (_, promise), self._watching = self._watching, None
            promise.answer(Answer(self.report()))
            self.world.heard()

    def report(self) -> WorkerReport:
        done = self.learn.first_group if self.learn is not None and self.learn.is_done else self._told
        failure = None if self.error is None else Failure.of(self.error)
        return WorkerReport(self.post.name, self.serial, self.doing, 0.0, self.moves, 0, done, failure=failure)

    def tell(self, group: int) -> None:
        """The first learner has ended a step."""
        if self._follows:
            self._told = group
            self.say()

    # Its stages

    def make_workers(self) -> None:
        world, config, dock = self.world, self.world.config, self.dock
        assert dock is not None
        if self.post.feeds and self.feed is None:
            self.feed = SimulatedFeed(config, world.graph, world.book, self, world.model.overheads.row_s)
        if self.feed is not None:
            self.ahead = Ahead(self.feed, dock, config)  # type: ignore[arg-type]
        stages = [name for name in self.post.stages if not self._follows or name in ("rollout", "reward")]
        made = {name: getattr(self, f"_{name}", None) for name in stages}
        self.workers = {name: make(dock) for name, make in made.items() if make is not None}

    def _rollout(self, dock: Dock) -> Worker:
        world = self.world
        if self.engine is None:
            slots, capacity = world.config.rollout.concurrent, world.model.cache_capacity()
            clock = DecodingClock(world.model, slots, capacity, self.speed)
            self.engine = SimulatedEngine(self, clock, world.book, world.config, world.groups_only)
        else:
            self.engine.clock.clear()
        self.rollout = RolloutWorker(dock, self.engine, world.config, self.tally)
        self.rollout.outputs = made_columns(world.graph)
        self.rollout.peers = world.peers
        return self.rollout

    def _reward(self, dock: Dock) -> Worker:
        world = self.world
        each = world.model.reward_s + world.model.overheads.row_s
        return SimulatedReward(dock, self, each, self.tally, world.graph.stage("reward").writes)

    def _advantage(self, dock: Dock) -> Worker:
        world, config = self.world, self.world.config
        algorithm: Any = SimulatedAlgorithm(world.algorithm, world.graph.stage("advantage").writes)

        def one(tag: str | None) -> AdvantageWorker:
            def refill(count: int) -> int:
                return self.ahead.refill(count, tag) if self.ahead is not None else 0

            made = AdvantageWorker(dock, algorithm, config, self.tally, refill)
            made.begin(0, tag)
            return made

        if self.ahead is not None and self.ahead.lead and config.algorithm.dynamic_sampling:
            return EveryStep("advantage", [one(tag) for tag in self.ahead.tags])
        return one(None)

    def _old_logprobs(self, dock: Dock) -> Worker:
        return self._scores("old_logprobs", dock)

    def _reference(self, dock: Dock) -> Worker:
        return self._scores("reference", dock)

    def _teacher(self, dock: Dock) -> Worker:
        return self._scores("teacher", dock)

    def _values(self, dock: Dock) -> Worker:
        return self._scores("values", dock)

    def _scores(self, name: str, dock: Dock) -> Worker:
        column = self.world.graph.stage(name).writes[0]
        return ScoreWorker(name, column, dock, self._policy(), self.world.config, self.tally)

    def _learn_values(self, dock: Dock) -> Worker:
        critic = SimulatedLearner(self, self.world.model, self.world.slowest)
        return LearnWorker(dock, critic, self.world.config, self.tally, "learn_values")

    def _learn(self, dock: Dock) -> Worker:
        critic: Any = self.workers.get("learn_values")
        self.learn = LearnWorker(dock, self._policy(), self.world.config, self.tally, "learn", critic)
        return self.learn

    def _policy(self) -> SimulatedLearner:
        if self.learner is None:
            self.learner = SimulatedLearner(self, self.world.model, self.world.slowest)
        return self.learner

    # Its thread

    def work(self, seconds: float, is_interruptible: bool = False) -> float:
        """Take so much of this worker's device, or of the machine's cores."""
        assert self.task is not None
        began = self.kernel.time
        owed, self.owed = self.owed, 0.0
        left = self.world.cores.work(self.task, seconds + owed, is_interruptible)
        self.world.timeline.span(self.post.name, self.doing, began, self.kernel.time)
        return min(left, seconds)

    def _run(self) -> None:
        assert self.task is not None
        self._idle_since = self.kernel.time
        while True:
            if self._obey() or self._poll():
                self._idle_since = self.kernel.time
                if self.owed > 0.05:
                    self.work(0.0)
                continue
            self._rest()

    def _rest(self) -> None:
        """Until a command comes, or the next look at a dock where something has changed for an open stage."""
        assert self.task is not None
        self.world.resting(self)
        is_late = self.rollout is not None and "rollout" in self.open and self.rollout.peers > 1
        woken = self.task.wait(LOOK_S if is_late and self.world.looks_for_stragglers() else FOREVER)
        self.world.working(self)
        if woken and not self._commands:
            tick = _next_look(self._idle_since, self.kernel.time)
            if tick > 0:
                self.task.wait(tick)

    def _obey(self) -> bool:
        if not self._commands:
            return False
        request, promise = self._commands.popleft()
        self.doing = request.name
        try:
            value = getattr(self, request.name)(*request.args)
        except Exception as error:
            self._answered(promise, failure=Failure.of(error))
        else:
            self._answered(promise, value)
        self.doing = ""
        self.say()
        return True

    def _poll(self) -> bool:
        moved, was_done = False, self.learn is not None and self.learn.is_done
        for stage in self.open:
            self.doing = stage
            moved = self.workers[stage].poll() or moved
            if self._commands:
                break
        self.doing = ""
        self.moves += moved
        if (self.learn is not None and self.learn.is_done) != was_done:
            self.say()
            if self.learn is not None and self.learn.is_done:
                self.world.learned(self.learn.first_group)
        return moved

    def _failed(self, error: BaseException) -> None:
        self.error = error
        self.say()

    # Commands

    def work_on(self, stages: tuple[str, ...]) -> None:
        self.open = tuple(name for name in self.workers if name in stages)

    def begin(self, first_group: int, tag: str | None) -> None:
        for worker in self.workers.values():
            worker.begin(first_group, tag)

    def share_among(self, rollouts: int) -> None:
        self.world.peers = rollouts
        if self.rollout is not None:
            self.rollout.peers = rollouts

    def leave_step(self) -> bool:
        if self.learn is not None and self.learn.has_begun:
            return False
        self.open = ()
        return True

    def open_step(self, step: int, start: dict[str, Any] | None) -> OpenedStep:
        assert self.feed is not None and self.ahead is not None and self.dock is not None
        self.work(self.world.model.overheads.feed_s)
        if start is not None:
            self.ahead = Ahead(self.feed, self.dock, self.world.config)  # type: ignore[arg-type]
            self.ahead.restore(start)
        opened = self.ahead.begin(step)
        return OpenedStep(opened.first_group, self.ahead.tag(step), self.ahead.starts, self.ahead.state(), 0)

    def feed_again(self) -> None:
        """Bytes are not lost here."""

    def feed_state(self) -> dict[str, Any]:
        assert self.ahead is not None
        return self.ahead.state()

    def connect(self, place: Any) -> None:
        self.dock = HostDock(place.connect("").dock, self)
        self.leases = weakref.WeakSet()
        if self.workers:
            self.make_workers()
        self.open = ()

    def measure(self) -> tuple[Any, list[tuple[bool, int]]]:
        return self.tally.drain(), []

    def write_samples(self, *_: Any) -> str:
        return ""

    def after_step(self, step: int, measured: dict[str, float]) -> None:
        """Nothing moves between steps."""

    def hold_kl(self, coef: float) -> None: ...

    def adjust(self, changes: dict[str, float]) -> None: ...

    def save(self, folder: Any, step: int, state: dict[str, Any], best: bool, metric: float | None, wait: bool) -> None:
        self.work(self.world.save_s)
        if self.learner is not None:
            self.world.saved[str(folder)] = state | {"version": self.learner.version}

    def settle(self) -> None: ...

    def restore(self, path: Any) -> dict[str, Any]:
        self.work(self.world.save_s)
        state = self.world.saved[str(path)]
        if self.learner is not None:
            self.learner.version = state["version"]
        return state

    def open_store(self, purpose: str) -> StoreAddress:
        return StoreAddress("", "")

    def join_world(self, where: StoreAddress) -> None: ...

    def join_engine(self, where: StoreAddress) -> None: ...

    def describe(self, rank: int, mates: tuple[int, ...]) -> tuple[Layout, Layout]:
        return EMPTY, EMPTY

    def link(self, link: Any, rank: int) -> None: ...

    def unlink(self) -> None: ...

    def move(self, version: int) -> MoveReport:
        self.doing = "publish"
        until = self.kernel.time + self.world.publish_s()
        while self.kernel.time < until and self.task is not None:
            self.task.wait(until - self.kernel.time)
        return self._moved()

    def take_up(self, version: int) -> int:
        if self.engine is not None:
            self.engine.load(None, version)
        return 0

    def version(self) -> int:
        return self.world.version

    def count_parameters(self) -> int:
        return self.world.model.shape.total


class HostDock:
    """A worker's way into the dock: the real one, whose calls take a while."""

    def __init__(self, dock: Any, host: SimulatedWorker) -> None:
        self._dock, self._host = dock, host
        self._call_s = host.world.model.overheads.dock_s

    def take(self, stage: str, want: Any, wait: float = 0.0) -> Any:
        lease = self._dock.take(stage, want)
        self._host.owed += self._call_s
        if lease is not None:
            self._host.leases.add(lease)
            self._host.owed += self._call_s  # of the commit to come
        return lease

    def put(self, rows: Any, tag: str = "") -> None:
        self._host.owed += self._call_s
        self._dock.put(rows, tag)

    def progress(self, stage: str, tag: str | None = None, until: Any = None, wait: float = 0.0) -> Any:
        self._host.owed += self._call_s
        return self._dock.progress(stage, tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dock, name)


def _next_look(since: float, now: float) -> float:
    """Seconds until a real worker that has been idle since then looks again: its pauses grow."""
    at, pause = since, IDLE_S[0]
    while at < now - 1e-9:
        at += pause
        pause = min(IDLE_S[1], pause * 1.5)
        if pause >= IDLE_S[1] and at < now:
            at += int((now - at) / pause) * pause
    return min(IDLE_S[1], max(0.0, at - now))
