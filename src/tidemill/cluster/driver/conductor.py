"""Conducts a step: which stages are open when, and what happens when a worker is lost. `sync` opens one stage after the
other, `streamed` and `async` all of them at once. A lost rollout or reward worker costs only its leases; where a step
cannot continue, it begins again at another dock, before any weight has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tidemill.cluster.commands import OpenedStep, WorkerCommands, request
from tidemill.cluster.driver.worker_pool import Member
from tidemill.cluster.start.handle import WorkerLost
from tidemill.dock import DockState
from tidemill.errors import DockError, TidemillError
from tidemill.flow.carry import CarryOver
from tidemill.flow.schedule import schedule_of
from tidemill.flow.workers import ALL_STAGES, Rewound, Stopped

if TYPE_CHECKING:
    from tidemill.cluster.driver.driver import Driver

LOOK_S = (0.004, 0.1)  # seconds between polls of the dock: at first, at most
MANY = 1000  # workers; with more of them the driver polls less often, so that its work does not grow
LEARNING = ("learn", "learn_values")
BESIDE = ("reward",)  # scores in its own threads while others work
ATTEMPTS = 5  # of one step


class Conductor:
    def __init__(self, driver: Driver) -> None:
        self.driver, self.pool = driver, driver.pool
        self.schedule = schedule_of(driver.config)
        self.carry = CarryOver(driver.config) if self.schedule.carries else None
        self.open: tuple[str, ...] = ()
        self.number = 0
        self.first_group = -1
        self.tag: str | None = None
        self.refeed = True  # the dock may lack rows of the step: put them again from the step's data position
        self._is_fed = False
        self._start: dict[str, Any] = {}  # data position at the beginning of the step
        self._broken = ""  # why the step cannot continue
        self._lost_rows = 0
        self._shared_at: tuple[int, str] | None = None  # the state in which rollout workers were last compared
        self._rollouts: list[
            tuple[str, int, str]
        ] = []  # workers that share the rollout, and their dock, as last announced
        self.moved_at, self._seen = self.pool.starter.now(), ""

    # A step

    def stages(self, number: int, stop: Callable[[], bool]) -> Iterator[str]:
        """A step; the names of its stages as they are done. Those of a step that begins again come again."""
        self.number, self._start = number, dict(self.driver.feed_state)
        for _ in range(ATTEMPTS):
            try:
                yield from self._attempt(stop)
                return
            except WorkerLost as lost:
                self.driver.check_learners()
                if self._is_learned():  # a learned step is not learned again
                    raise Rewound(f"{lost} after the step was learned; back to the newest checkpoint") from lost
                self.driver.note(f"the step begins again: {lost}")
                self._begin_again()
        raise TidemillError(f"a step began {ATTEMPTS} times and never ended", "the notes above say why each time")

    def _attempt(self, stop: Callable[[], bool]) -> Iterator[str]:
        self._broken, self._lost_rows = "", 0
        fed = self._feed(stop)
        self.moved_at = self.pool.starter.now()
        if self.schedule.in_turn:
            yield from self._one_after_the_other(stop)
        else:
            self._all_at_once(stop)
            yield ALL_STAGES
        if not self.schedule.lead:
            self._work_on(())
        self._is_fed = False
        self.driver.feed_state = fed.starts.get(self.number + 1, fed.state)
        if (
            self.driver.config.algorithm.dynamic_sampling and not self.schedule.lead
        ):  # more groups than the step's were fed
            self.driver.feed_state = self.pool.call(self.driver.feeder, request(WorkerCommands.feed_state))
        if self.carry is not None:
            self.driver.feed_state["under_way"] = self.carry.left(self.driver.feed_state["under_way"])
        self._publish()

    def _feed(self, stop: Callable[[], bool]) -> OpenedStep:
        feeder = self.driver.feeder
        while feeder.state != "ready":
            self.driver.check_learners()
            self.pool.pump(0.2)
        start = self._start if self.refeed or not self.schedule.lead else None
        self.driver.stop, self.driver.seen = stop, None
        try:
            opened = request(WorkerCommands.open_step, self.number, start)
            fed = self.pool.call(feeder, opened, meanwhile=lambda: self.driver.interrupt(feeder) if stop() else None)
        finally:
            self.driver.stop = lambda: False  # rows that replace dropped groups belong to a step that has begun
        self.first_group, self.tag = fed.first_group, fed.tag
        self.driver.bad_rows = fed.bad_rows
        self._is_fed, self.refeed = True, False
        if self.carry is not None:
            self.carry.begin(self.number, fed.state["under_way"])
        acting = self.pool.acting
        for member in acting:
            self._hold_kl(member)
        begin = request(WorkerCommands.begin, self.first_group, self.tag)
        self.pool.call_all(self._learners(), lambda _: begin)
        for member in acting:
            if not member.learns:
                self.pool.send(member, begin)
        return fed

    def _one_after_the_other(self, stop: Callable[[], bool]) -> Iterator[str]:
        names = [stage.name for stage in self.driver.graph.stages]
        beside = [name for name in names if name in BESIDE]
        while not self._is_learned():  # one pass, unless a stage puts new rows or rows come back
            for name in names:
                if name in LEARNING and self.carry is not None:
                    if self.carry.lacks(self.driver.run_dock.dock):
                        break  # groups were dropped: others take their places first
                    self.carry.is_closed = True
                turn = list(dict.fromkeys([name, *beside]))
                self._work_on(turn)
                self._until(lambda turn=turn: self._is_still(turn), stop)  # type: ignore[misc]
                yield name
                self.moved_at = self.pool.starter.now()  # whoever drives the stages may have taken long

    def _all_at_once(self, stop: Callable[[], bool]) -> None:
        self._work_on(stage.name for stage in self.driver.graph.stages)
        self._until(self._is_learned, stop)

    def _is_still(self, turn: list[str]) -> bool:
        if self._is_learned():
            return True
        dock = self.driver.run_dock.dock
        if self.carry is not None and "rollout" in turn:
            return self.carry.fill(dock)
        if "learn" in turn:  # learners report themselves when the step is done
            upstream = [stage.name for stage in self.driver.graph.stages if stage.name != "learn"]
            return any(dock.progress(name, self.tag).ready for name in upstream)  # rows came back to an earlier stage
        return all(dock.progress(name, self.tag).is_idle for name in turn)

    def _is_learned(self) -> bool:
        return all(m.report is not None and m.report.done_group == self.first_group for m in self._learners())

    # Waiting

    def _until(self, is_over: Callable[[], bool], stop: Callable[[], bool]) -> None:
        many = max(1.0, len(self.pool.members) / MANY)
        pause, least_s, most_s = LOOK_S[0], LOOK_S[0] * many, LOOK_S[1] * many
        dock, is_stuck = self.driver.run_dock.dock, False
        while True:
            self.driver.check_learners()
            if self._broken:
                raise WorkerLost(self._broken)
            if stop() and self._leave():
                raise Stopped
            self.driver.mend_stores()
            self._share_rollout()
            try:
                state, ended = dock.state(), is_over()
            except DockError as error:  # a ledger that does not come back
                raise WorkerLost(error.message) from error
            self.driver.look(state)
            self.driver.traffic.look(state)
            if ended:
                return
            if is_stuck:
                counts = "; ".join(f"{name}: {c.ready} ready, {c.leased} leased" for name, c in state.stages.items())
                raise TidemillError(f"the step ended with {state.rows} samples still in the dock ({counts})")
            if newcomers := self.driver.publisher.newcomers():
                self.driver.publisher.bring(newcomers)
            if state.lost > self._lost_rows:
                self._lost_rows = state.lost
                self.pool.send(self.driver.feeder, request(WorkerCommands.feed_again))
            pause = least_s if self._has_moved(state) else min(most_s, pause * 1.3)
            self.pool.pump(pause)
            is_stuck = self.pool.starter.is_stuck

    def _share_rollout(self) -> None:
        """Tell rollout workers how many share the work; each takes its share."""
        seen = self.pool.changes, self.driver.run_dock.place.ledger
        if seen == self._shared_at:
            return
        self._shared_at = seen
        members = self.pool.engines(self.pool.wiring.engines.name)
        now = [(m.name, m.incarnation, m.dock) for m in members]
        if now != self._rollouts:
            self._rollouts = now
            for member in members:
                self.pool.send(member, request(WorkerCommands.share_among, len(members)))

    def _has_moved(self, state: DockState) -> bool:
        """Say whether anything has changed since the last call; after too long without, report who waits."""
        stages = [(c.ready, c.leased, c.done) for c in state.stages.values()]
        seen = repr((stages, state.ended, self.pool.moves, self.pool.changes))
        now = self.pool.starter.now()
        if seen != self._seen:
            self._seen, self.moved_at = seen, now
            return True
        if now - self.moved_at > self.driver.stall_s:
            self.driver.stalled(state, now - self.moved_at)
            self.moved_at = now
        return False

    def _leave(self) -> bool:
        """Try to leave the step; False when a learner has begun with it."""
        told = self.pool.call_all(self._learners(), lambda _: request(WorkerCommands.leave_step))
        if not all(told.values()):
            self._work_on(self.open)
            return False
        self.driver.feed_state = dict(self._start)
        return True

    # Members

    def _learners(self) -> Sequence[Member]:
        return self.pool.learners()

    def _work_on(self, stages: Iterable[str]) -> None:
        self.open = tuple(stages)
        opened = request(WorkerCommands.work_on, self.open)
        for member in self.pool.acting:
            self.pool.send(member, opened)

    def _publish(self) -> None:
        version = self.driver.publisher.publish()
        self.driver.run_dock.dock.advance(version)

    def _begin_again(self) -> None:
        self._is_fed, self.refeed = False, True
        self.driver.new_dock()

    def welcome(self, member: Member) -> None:
        """Let a worker that has come up take part in the step."""
        if member.post.feeds:
            self.refeed = True
            if self._is_fed and self.driver.config.algorithm.dynamic_sampling:
                self._broken = f"{member.name} was lost with its data position"
            elif self._is_fed:  # rows that the dock has are not added twice
                self.pool.send(member, request(WorkerCommands.open_step, self.number, self._start))
        self._hold_kl(member)
        if self._is_fed:
            self.pool.send(member, request(WorkerCommands.begin, self.first_group, self.tag))
        self.pool.send(member, request(WorkerCommands.work_on, self.open))

    def _hold_kl(self, member: Member) -> None:
        """Pass a KL coefficient that adapts from the learners to where advantages are computed."""
        if self.driver.kl_coef is not None:
            self.pool.send(member, request(WorkerCommands.hold_kl, self.driver.kl_coef))
