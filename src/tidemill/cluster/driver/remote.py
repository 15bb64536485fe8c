"""Roles as processes: the loop's workers when they are not this process. The driver starts, watches, conducts, counts.

Samples go from worker to worker through the dock, weights over links between learner and rollout. What comes here is
counts, positions and states.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tidemill.cluster.driver import placement as placements
from tidemill.cluster.driver import stall, status
from tidemill.cluster.driver.conductor import Conductor
from tidemill.cluster.driver.logs import LogStream
from tidemill.cluster.driver.placement import LEARNER, ROLLOUT, Placement, Post
from tidemill.cluster.driver.publish import Publisher
from tidemill.cluster.driver.run_dock import Meeting
from tidemill.cluster.driver.worker_pool import Member, WorkerPool
from tidemill.cluster.start.forkserver import Forks
from tidemill.cluster.start.handle import Starter, WorkerLost
from tidemill.dock import DockState
from tidemill.errors import TidemillError
from tidemill.flow.records import Activity, Evaluation
from tidemill.flow.tally import Counted, together
from tidemill.flow.workers import Rewound
from tidemill.graph import Graph
from tidemill.observe import health
from tidemill.observe.metrics import MetricsWriter
from tidemill.observe.run_folder import RunFolder
from tidemill.recipe.config import Config

MOST_STALLS = 3  # in one run; a run that stands still again and again is ended
STATUS_S = 1.0
SETTLE_S = 120.0  # for checkpoints that are being written when the run ends
SHOWN_ANSWERS = 32  # of an evaluation: for people to look at


def start(config: Config, model_path: Path | None, folder: RunFolder, note: Callable[[str], None]) -> RemoteWorkers:
    ranks = max(config.cluster.learners, config.learn.parallel.ranks)  # of a learner that is cut
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"learners": ranks})})
    with ThreadPoolExecutor(1) as beside:  # the table of stages brings torch, the starter a cluster: both take seconds
        table = beside.submit(_graph, config)
        starter = make_starter(config, folder)
    try:
        graph = table.result()
        nodes = starter.nodes()
        placement = placements.place(config, graph, placements.accelerator_of(config, nodes))
        placements.check(placement, nodes, config.cluster)
        starter.reserve(placement)
    except BaseException:
        starter.close()
        raise
    workers = RemoteWorkers(config, model_path, folder, note, starter, placement, graph)
    try:
        workers.start()
    except BaseException:
        workers.close()
        raise
    return workers


def _graph(config: Config) -> Graph:
    from tidemill.algorithms.registry import get

    return get(config.algorithm.name).graph(config)


def make_starter(config: Config, folder: RunFolder) -> Starter:
    cluster = config.cluster
    forks = Forks(Path(tempfile.mkdtemp(prefix="tm-")) / "forks")  # short: a socket's path is limited
    if cluster.executor == "processes" or cluster.address == "local":
        forks.start()  # first of all: its imports take longest
    try:
        if cluster.executor == "processes":
            from tidemill.cluster.start.processes import ProcessStarter

            return ProcessStarter(forks)
        from tidemill.cluster.start.ray import RayStarter

        return RayStarter(cluster, folder.config.name, forks, config.rollout.tp, bool(config.rewards.models))
    except BaseException:
        forks.close()
        raise


class RemoteWorkers:
    def __init__(
        self,
        config: Config,
        model_path: Path | None,
        folder: RunFolder,
        note: Callable[[str], None],
        starter: Starter,
        placement: Placement,
        graph: Graph,
    ) -> None:
        self.config, self.model_path, self.folder = config, model_path, folder
        self.starter, self.placement, self.graph = starter, placement, graph
        self.path = folder.path.resolve()
        self._tell = note
        self.logs = LogStream(self.path / "logs")
        self.crew = WorkerPool(
            config.cluster, placement, starter, self.logs.folder, self.note, self._equip, self._on_ready, self._on_lost
        )
        self.crew.check = self.check_learners
        self.crew.examine = lambda why: f" (stacks: {stall.report(self.crew, self.logs.folder, [why])})"
        self.publisher = Publisher(self.crew, config.cluster.collective_s, config.reshard.verify, self.check_learners)
        self.parameters = self.bad_rows = self.stalls = 0
        self.kl_coef: float | None = None  # where it is steered: whoever comes (back) is told
        self._looked, self._told_step = 0.0, 0
        self.feed_state: dict[str, Any] = {}
        self._first_feed: dict[str, Any] = {}
        self._history: list[dict[str, float]] = []
        self._told: set[str] = set()
        self._is_up = False
        self._lost_learner = ""
        self._end_stacks: Callable[[], None] = lambda: None
        self.meeting = Meeting(config, graph, self.path / "dock", starter)
        self.conductor = Conductor(self)

    def note(self, text: str) -> None:
        self.logs.say(text)
        self._tell(text)

    # Starting

    def start(self) -> None:
        self._end_stacks = status.keep_stacks(self.logs.folder / "driver.stacks")
        self.crew.start(self.crew.members)
        self.look()
        self._come_up()
        self.look()
        self._first_feed = self.feed_state = self.crew.call(self.feeder, "feed_state")["state"]

    def _come_up(self) -> None:
        """Until everybody is there, the ranks know one another, and rollout has the learner's weights."""
        while True:
            self.crew.wait_ready(list(self.crew.members))
            try:
                self._form_world()
                self.publisher.publish()
                break
            except (WorkerLost, Rewound) as lost:  # ranks do not join a world twice: all of them start again
                self.note(f"starting again: {lost}")
                self._restart_learners()
        self._is_up = True

    def _restart_learners(self) -> None:
        self.publisher.forget()
        for member in self.crew.learners():
            if member.handle is not None:
                member.handle.kill()
            member.become("lost")
            self.crew.again(member)
        self._lost_learner = ""

    @property
    def feeder(self) -> Member:
        return next(m for m in self.crew.members.values() if m.post.feeds)

    @property
    def first_token_s(self) -> float | None:
        """When, since the epoch, the first token of a training sample was made."""
        times = [m.report.first_token_s for m in self.crew.members.values() if m.report is not None]
        return min((t for t in times if t is not None), default=None)

    def _equip(self, member: Member) -> Future[Any]:
        from tidemill.cluster.assignment import Assignment

        assert member.handle is not None
        self.meeting.store(member)
        task = Assignment(
            post=member.post,
            config=self.config,
            model_path=None if self.model_path is None else self.model_path.resolve(),
            dock=self.meeting.server.address,
            node=member.node,
            host=member.host,
            logs=self.crew.logs,
        )
        member.dock = task.dock.ledger
        return member.handle.call("equip", task)

    def _form_world(self) -> None:
        learners = self.crew.of(LEARNER)
        if len(learners) > 1:
            where = self.crew.call(learners[0], "open_store", "world")
            self.crew.call_all(learners, "join_world", lambda _: (where,), self.config.cluster.start_s)
        self.parameters = self.crew.call(learners[0], "count_parameters")

    # Losing and coming back

    def _on_ready(self, member: Member) -> None:
        address = self.meeting.server.address
        if member.dock != address.ledger:  # it came up while the others went to another dock
            member.dock = address.ledger
            self.crew.send(member, "connect", address)
        if self._is_up:
            self.conductor.welcome(member)

    def _on_lost(self, member: Member, why: str) -> bool:
        if member.post.group.name == LEARNER and self._is_up:
            if not self._lost_learner:
                others = [m for m in self.crew.learners() if m is not member]
                late, words = stall.blame(others, float("inf")) if "imed out" in why else (None, "")
                if late is not None:  # the one that gave up is not the one that hangs
                    stall.report(self.crew, self.logs.folder, [words])
                self._lost_learner = words or f"{member.name} is lost: {why.splitlines()[0]}"
            return False
        return True  # its leases run out by themselves

    def check_learners(self) -> None:
        """Raise when a rank was lost: its weights went with it."""
        if self._lost_learner:
            raise Rewound(f"{self._lost_learner}; the learners start again from the newest checkpoint")

    def rewind(self) -> None:
        self._is_up = False
        self._restart_learners()
        self.new_dock()
        self._come_up()
        self.feed_state, self.conductor.refeed = self._first_feed, True
        kl = self.config.algorithm.kl
        self.kl_coef = kl.coef if kl.target is not None else None  # workers that stayed hold one that was steered

    def stalled(self, state: DockState, seconds: float) -> None:
        """Nothing has moved for long: say who waits for whom; who hangs is replaced, else the step begins again."""
        found = stall.examine(self.crew, state, seconds)
        self.note(f"nothing has moved for {seconds:.0f} s: {'; '.join(found.sentences)} (stacks: {found.file})")
        self.stalls += 1
        if self.stalls > MOST_STALLS:
            raise TidemillError(
                f"nothing has moved for {seconds:.0f} s, {self.stalls} times: {'; '.join(found.sentences)}",
                f"the stacks of all workers are in {found.file}; raise cluster.stall_s if work may take that long",
            )
        if found.culprit is not None:
            self.crew.lose(self.crew.members[found.culprit], found.why)
        else:
            raise WorkerLost("nothing moves and nobody is at work")

    def look(self, state: DockState | None = None, is_over: bool = False) -> None:
        """Leave word of how things stand for `tidemill status`: in the midst of steps now and then, and when the first
        begins; without a `state` at once."""
        now = time.monotonic()
        is_first = self._told_step == 0 < self.conductor.number
        if now - self._looked < STATUS_S and state is not None and not is_first:
            return
        self._looked, self._told_step = now, self.conductor.number
        if self._is_up:
            self._grow_or_shrink()
        moved = self.conductor.moved_at
        found = status.RunStatus(
            step=self.conductor.number,
            steps=self.config.train.steps,
            open=self.conductor.open,
            since=time.time() - (now - moved),
            written=time.time(),
            where=self.starter.describe(),
            driver=os.getpid(),
            machine=socket.gethostname(),
            workers=tuple(status.of_member(m) for m in self.crew.members.values()),
            stages=status.stages_of(state) if state is not None else {},
            lost=self.crew.lost_total,
            ray=self.starter.address,
            home=self.starter.home[0],
            logs=str(self.crew.logs),
            is_over=is_over,
        )
        status.write(self.path, found)

    def _grow_or_shrink(self) -> None:
        """Rollout workers join and leave while the run goes on: `tidemill scale` leaves word of how many there shall
        be."""
        if self.placement.is_colocated:
            return
        group = self.placement.group(ROLLOUT)
        wanted = status.wanted_rollouts(self.path)
        assert group is not None
        if wanted is None:
            return
        ranks = sorted(m.post.rank for m in self.crew.of(ROLLOUT, ready=False))
        most = max(wanted, 1) * group.engine_ranks
        for rank in range(most):
            if rank not in ranks:
                self.note(f"rollout-{rank} joins")
                self.crew.add(Post(group, rank))
        for rank in ranks:
            if rank >= most:
                self.note(f"rollout-{rank} leaves")
                self.crew.remove(f"rollout-{rank}")

    def mend_stores(self) -> None:
        """A node's warehouse is gone, with what lay in it: the dock hears of it at once, and who is left there gets
        another."""
        for node in self.starter.lost_stores():
            self.note(f"the warehouse of node {node[:8]} is lost")
            self.meeting.server.lose(node)
            there = [m for m in self.crew.ready if m.node == node]
            if there:
                with contextlib.suppress(TidemillError):  # the node itself is gone: its workers will be missed too
                    self.meeting.store(there[0])

    def new_dock(self) -> None:
        """Leave the dock with all that is in it, and meet at another."""
        for member in self.crew.ready:
            if member.handle is not None:
                member.handle.call("leave", member.dock)
        address = self.meeting.renew()
        for member in self.crew.ready:
            if member.post.group.name == LEARNER and not self._is_up:
                continue
            self.meeting.store(member)
            member.dock = address.ledger
            try:
                self.crew.call(member, "connect", address)
            except WorkerLost as lost:
                self.crew.lose(member, str(lost))

    # What the loop asks

    def step(self, number: int, stop: Callable[[], bool]) -> None:
        self.conductor.step(number, stop)
        self.crew.step_made()

    def measure(self) -> dict[str, float]:
        told = self._from_all("measure")
        self._shown = {name: ids for name, (_, ids) in told.items()}
        of_samples = Counted.of_samples(self.meeting.dock.counted())
        measured = together([*(counted for counted, _ in told.values()), of_samples])
        heard, self.crew.received_bytes = self.crew.received_bytes, 0
        own = {"workers_lost": float(self.crew.lost_total), "driver_bytes": float(heard)}
        return measured | {"version": float(self.publisher.version), **own}

    def _from_all(self, method: str, *args: Any) -> dict[str, Any]:
        """The answers of all who are there; one that is lost meanwhile has no word."""
        futures = {m.name: self.crew.send(m, method, *args) for m in self.crew.ready}
        told = {}
        deadline = time.monotonic() + self.config.cluster.stall_s
        for name, future in futures.items():
            while not future.done():
                self.check_learners()
                self._give_up_late(name, method, deadline)
                self.crew.pump(0.2)
            with contextlib.suppress(WorkerLost):
                told[name] = self.crew.unwrap(name, future)
        return told

    def _give_up_late(self, name: str, method: str, deadline: float) -> None:
        """One that answers when it is watched, but hangs in its work, is not waited for without end."""
        member = self.crew.members.get(name)
        if time.monotonic() < deadline or member is None or member.state != "ready":
            return
        why = f"{name} did not come to {method!r} within {self.config.cluster.stall_s:g} s: it hangs"
        self.crew.lose(member, f"{why}{self.crew.examine(why)}")

    def after_step(self, step: int, measured: dict[str, float]) -> list[str]:
        coefs = [c for c in self._from_all("after_step", step, dict(measured)).values() if c is not None]
        if coefs:
            measured["kl_coef"] = self.kl_coef = coefs[0]
        self._history.append(measured)
        fresh = [sign for sign in health.signs(self._history) if sign.sign not in self._told]
        self._told |= {sign.sign for sign in fresh}
        return [sign.sentence for sign in fresh]

    def write_samples(self, step: int, metrics: MetricsWriter) -> None:
        """Who has a sample writes it; the driver chooses by id alone."""
        owner = {id: name for name, ids in self._shown.items() for id in ids}
        chosen = sorted(owner)[: self.config.observe.samples_per_step]
        for name in dict.fromkeys(self._shown):
            member = self.crew.members.get(name)
            if member is not None and member.state == "ready":
                own = [i for i in chosen if owner[i] == name]
                with contextlib.suppress(WorkerLost):
                    self.crew.call(member, "write_samples", step, own, self.path / "samples.jsonl")

    def activity(self) -> Activity | None:
        return None

    def evaluate(self, size: int, samples: int, tell: Callable[[Activity], None] = lambda activity: None) -> Evaluation:
        # A running mean of the weights is the learner's own.
        group = LEARNER if self.placement.is_colocated or self.config.learn.ema else ROLLOUT
        while True:
            self.check_learners()
            self.publisher.bring(self.publisher.newcomers())
            ready = self.crew.engines(group)
            if not ready:
                self.crew.pump(0.5)
                continue
            try:
                return self._evaluated(ready[0], size, samples)
            except WorkerLost as lost:
                self.note(f"evaluation begins again: {lost}")

    def _evaluated(self, member: Member, size: int, samples: int) -> Evaluation:
        """However long it takes, as long as tokens are made, or answers judged."""
        future = self.crew.send(member, "evaluate", size, samples, SHOWN_ANSWERS)
        moves, moved_at = -1, time.monotonic()
        while not future.done():
            self.check_learners()
            self.crew.pump(0.2)
            now = time.monotonic()
            if member.report is not None and member.report.moves != moves:
                moves, moved_at = member.report.moves, now
            if now - moved_at > self.config.cluster.stall_s:
                why = f"{member.name} has made no token and no score of an evaluation for {now - moved_at:.0f} s"
                self.crew.lose(member, f"{why}{self.crew.examine(why)}")
        seen: Evaluation = self.crew.unwrap(member.name, future)
        return seen

    def save(
        self, folder: Path, step: int, state: dict[str, Any], *, best: bool = False, metric: float | None = None
    ) -> None:
        whole = {"feed": self.feed_state} | state
        learners = self.crew.learners()
        order = (folder.resolve(), step, whole, best, metric, step >= self.config.train.steps)
        try:
            self.crew.call_all(learners, "save", lambda _: order)
        except WorkerLost as lost:
            self.crew.pump(0.5)
            self.check_learners()
            raise TidemillError(f"the checkpoint of step {step} could not be written: {lost}") from lost

    def restore(self, path: Path) -> dict[str, Any]:
        told = self.crew.call_all(self.crew.learners(), "restore", lambda _: (path.resolve(),))
        state: dict[str, Any] = next(iter(told.values()))
        self.feed_state, self.conductor.refeed = state["feed"], True
        self.kl_coef = state["kl"]["coef"] if "kl" in state else None
        self.publisher.publish()
        return state

    def keep_definition(self, run: Path) -> None:
        self.crew.call(self._holder(), "keep_definition", run.resolve())

    def save_model(self, folder: Path) -> None:
        self.crew.call(self._holder(), "save_model", folder.resolve())

    def _holder(self) -> Member:
        """Who has a whole model, as it is learned now."""
        if self.placement.is_colocated or not self.placement.learners.is_cut:
            return self.crew.learners()[0]
        while not (ready := self.crew.engines(ROLLOUT)) or self.publisher.newcomers():
            self.check_learners()
            self.publisher.bring(self.publisher.newcomers())
            self.crew.pump(0.2)
        return ready[0]

    def _settle(self) -> None:
        """Whatever ends the run, a checkpoint that is under way is finished."""
        if self._is_up and not self._lost_learner:
            try:
                self.crew.call_all(self.crew.learners(), "settle", lambda _: (), SETTLE_S)
            except (TidemillError, WorkerLost) as error:
                self.note(f"a checkpoint was not finished: {error}")

    def close(self) -> None:
        self._settle()
        if self._is_up and self.conductor.number >= self.config.train.steps:
            with contextlib.suppress(OSError):  # a full disk does not keep workers from being ended
                self.look(is_over=True)
        self.crew.close()
        self._end_stacks()
        self.logs.close()
        self.meeting.close()
