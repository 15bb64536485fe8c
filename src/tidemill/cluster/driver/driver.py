"""The driver of a run: the loop's side of all workers, wherever they are. It starts, watches, conducts and counts.
Samples travel from worker to worker through the dock, weights over links between learner and rollout. Only counts,
positions and states come here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from tidemill.cluster.assignment import Assignment, Hooks
from tidemill.cluster.commands import HostCommands, Request, WorkerCommands, request
from tidemill.cluster.driver import stall, status
from tidemill.cluster.driver.activity import what_it_is_at
from tidemill.cluster.driver.conductor import Conductor
from tidemill.cluster.driver.evaluation import evaluated
from tidemill.cluster.driver.logs import LogStream
from tidemill.cluster.driver.publish import Publisher
from tidemill.cluster.driver.status_writer import StatusWriter
from tidemill.cluster.driver.traffic import Traffic
from tidemill.cluster.driver.worker_pool import Member, WorkerPool
from tidemill.cluster.start.handle import Starter, WorkerLost
from tidemill.cluster.wiring import LEARNER, ROLLOUT, Wiring
from tidemill.device import host
from tidemill.dock import DockState
from tidemill.errors import TidemillError
from tidemill.estimate.run import samples_per_step
from tidemill.flow.adjust import adjusted, refusal
from tidemill.flow.dump import Dump
from tidemill.flow.records import Activity, Evaluation
from tidemill.flow.tally import Counted, together
from tidemill.flow.workers import MachineReport, Rewound
from tidemill.graph import Graph
from tidemill.observe import health
from tidemill.observe.run_folder import RunFolder
from tidemill.recipe.config import Config

MOST_STALLS = 3  # in one run; a run that keeps stalling is ended
STATUS_S = 1.0
SETTLE_S = 120.0  # for checkpoints still being written when the run ends
R = TypeVar("R")


class Driver:
    """Implements `Workers`."""

    def __init__(
        self,
        config: Config,
        model_path: Path | None,
        folder: RunFolder,
        note: Callable[[str], None],
        starter: Starter,
        wiring: Wiring,
        graph: Graph,
    ) -> None:
        self.config, self.model_path, self.folder = config, model_path, folder
        self.starter, self.wiring, self.graph = starter, wiring, graph
        self.path = folder.path.resolve()
        self._tell = note
        self._logs = LogStream(self.path / "logs") if starter.has_processes else None
        logs = self.path / "logs"
        self.pool = WorkerPool(
            config.cluster, wiring, starter, logs, self.note, self._build, self._on_ready, self._on_lost
        )
        self.pool.check = self.check_learners
        self.pool.examine = lambda why: f" (stacks: {stall.report(self.pool, logs, [why])})"
        self.publisher = Publisher(self.pool, config, self.check_learners)
        self.parameters = self.bad_rows = self.stalls = 0
        self.stall_s = 2 * config.flow.lease_s if starter.is_here else config.cluster.stall_s
        self.kl_coef: float | None = None  # where it adapts: workers that start (again) get it
        self.feed_state: dict[str, Any] = {}
        self._first_feed: dict[str, Any] = {}
        self._history: list[health.Metrics] = []
        self._warned: set[str] = set()
        self._shown: dict[str, list[tuple[bool, int]]] = {}  # samples that could be shown, by the worker that has them
        self.is_up = False
        self.seen: DockState | None = None  # the dock, when it was last looked at within the step
        self._lost_learner = ""
        self._end_stacks: Callable[[], None] = lambda: None
        self.stop: Callable[[], bool] = lambda: False  # called while a step is fed
        self.tell: Callable[[Activity], None] = lambda activity: None  # called during an evaluation
        self._dump = (
            Dump(self.path, config.observe.dump, [s.name for s in graph.stages]) if config.observe.dump else None
        )
        self.run_dock = starter.open_dock(config, graph, self.path, self._dump)
        self.conductor = Conductor(self)
        self.status = StatusWriter(self)
        self.traffic = Traffic(starter.now)
        self.machines: dict[str, MachineReport] = {}
        self.home = starter.home[0]

    def note(self, text: str) -> None:
        if self._logs is not None:
            self._logs.say(text)
        self._tell(text)

    # Starting

    def start(self) -> None:
        if self.starter.has_processes:
            self._end_stacks = status.keep_stacks(self.pool.logs / "driver.stacks")
        self.pool.start(self.pool.members)
        self.look()
        self._come_up()
        self.look()
        self._first_feed = self.feed_state = self.pool.call(self.feeder, request(WorkerCommands.feed_state))

    def _come_up(self) -> None:
        """Wait until all workers are up, the ranks are joined, and rollout has the learner's weights."""
        while True:
            self.pool.wait_ready(list(self.pool.members))
            try:
                self._form_world()
                self.publisher.publish()
                break
            except (WorkerLost, Rewound) as lost:  # ranks do not join a world twice: all of them start again
                self.note(f"starting again: {lost}")
                self._restart_learners()
        self.is_up = True

    def _restart_learners(self) -> None:
        self.publisher.forget()
        for member in self.pool.learners():
            if member.handle is not None:
                member.handle.kill()
            self.pool.become(member, "lost")
            self.pool.again(member)
        self._lost_learner = ""

    @property
    def feeder(self) -> Member:
        return next(m for m in self.pool.members.values() if m.post.feeds)

    @property
    def first_token_s(self) -> float | None:
        """Return when the first token of a training sample was made, in seconds since the epoch."""
        times = [m.report.first_token_s for m in self.pool.members.values() if m.report is not None]
        return min((t for t in times if t is not None), default=None)

    def _build(self, member: Member) -> Future[Any]:
        assert member.handle is not None
        self.run_dock.store(member)
        config, is_here = self.config, self.starter.is_here
        # Workers of one process that compute at once share the cores; processes of their own take one each.
        threads = max(1, host.cores() // len(self.pool.members)) if is_here else 1
        task = Assignment(
            post=member.post,
            config=config,
            model_path=None if self.model_path is None else self.model_path.resolve(),
            dock=self.run_dock.place,
            node=member.node,
            host=member.host,
            logs=self.pool.logs,
            device=config.device if is_here else config.device.partition(":")[0],  # its starter has decided which one
            threads=config.threads or threads,
            dies_alone=not is_here,
            hooks=Hooks(self._dump, lambda: self.stop(), lambda activity: self.tell(activity)) if is_here else Hooks(),
        )
        member.dock = task.dock.ledger
        return member.handle.call(request(HostCommands.build, task))

    def _form_world(self) -> None:
        learners = self.pool.of(LEARNER)
        if len(learners) > 1:
            where = self.pool.call(learners[0], request(WorkerCommands.open_store, "world"))
            joined = request(WorkerCommands.join_world, where)
            self.pool.call_all(learners, lambda _: joined, self.config.cluster.start_s)
        self.parameters = self.pool.call(learners[0], request(WorkerCommands.count_parameters))

    # Losing and coming back

    def _on_ready(self, member: Member) -> None:
        place = self.run_dock.place
        if member.dock != place.ledger:  # it came up while the others went to another dock
            member.dock = place.ledger
            self.pool.send(member, request(WorkerCommands.connect, place))
        if self.is_up:
            self.conductor.welcome(member)

    def _on_lost(self, member: Member, why: str) -> bool:
        if member.post.group.restart == "world" and self.is_up:
            if not self._lost_learner:
                others = [m for m in self.pool.learners() if m is not member]
                late, words = stall.blame(others, float("inf")) if "imed out" in why else (None, "")
                if late is not None:  # the rank that gave up is not the one that hangs
                    stall.report(self.pool, self.pool.logs, [words])
                self._lost_learner = words or f"{member.name} is lost: {why.splitlines()[0]}"
            return False
        return True  # its leases expire by themselves

    def check_learners(self) -> None:
        """Raise when a rank was lost, because its weights went with it."""
        if self._lost_learner:
            raise Rewound(f"{self._lost_learner}; the learners start again from the newest checkpoint")

    def rewind(self) -> None:
        self.is_up = False
        self._restart_learners()
        self.new_dock()
        self._come_up()
        self.feed_state, self.conductor.refeed = self._first_feed, True
        kl = self.config.algorithm.kl
        self.kl_coef = kl.coef if kl.target is not None else None  # workers that stayed hold an adapted one

    def stalled(self, state: DockState, seconds: float) -> None:
        """Nothing has moved for long: report who waits for whom; replace a worker that hangs, else begin the step
        again."""
        if self.starter.is_here:
            waits = "; ".join(f"{name}: {c.ready} ready, {c.leased} leased" for name, c in state.stages.items())
            raise TidemillError(
                f"nothing has moved for {seconds:.0f} s ({waits})", "see the log; raise rewards.timeout_s if it is slow"
            )
        found = stall.examine(self.pool, state, seconds)
        self.note(f"nothing has moved for {seconds:.0f} s: {'; '.join(found.sentences)} (stacks: {found.file})")
        self.stalls += 1
        if self.stalls > MOST_STALLS:
            raise TidemillError(
                f"nothing has moved for {seconds:.0f} s, {self.stalls} times: {'; '.join(found.sentences)}",
                f"the stacks of all workers are in {found.file}; raise cluster.stall_s if work may take that long",
            )
        if found.culprit is not None:
            self.pool.lose(self.pool.members[found.culprit], found.why)
        else:
            raise WorkerLost("nothing moves and no worker is busy")

    def look(self, state: DockState | None = None, is_over: bool = False) -> None:
        """Write status.json, if it is time for it or `state` is None, and let workers join and leave."""
        self.seen = state or self.seen
        if self.starter.has_processes:
            self.status.write(state, is_over)

    def mend_stores(self) -> None:
        """Report a node's lost warehouse to the dock at once, and give the workers left on the node another one."""
        for node in self.starter.lost_stores():
            self.note(f"the warehouse of node {node[:8]} is lost")
            self.run_dock.lose(node)
            there = [m for m in self.pool.ready if m.node == node]
            if there:
                with contextlib.suppress(
                    TidemillError
                ):  # the node itself is gone: its workers will be found missing, too
                    self.run_dock.store(there[0])

    def new_dock(self) -> None:
        """Leave the dock with all that is in it, and connect everyone to another."""
        for member in self.pool.ready:
            if member.handle is not None:
                member.handle.call(request(HostCommands.leave, member.dock))
        self.run_dock.renew()
        place = self.run_dock.place
        for member in self.pool.ready:
            if member.post.group.restart == "world" and not self.is_up:
                continue
            self.run_dock.store(member)
            member.dock = place.ledger
            try:
                self.pool.call(member, request(WorkerCommands.connect, place))
            except WorkerLost as lost:
                self.pool.lose(member, str(lost))

    # What the loop asks

    def stages(self, number: int, stop: Callable[[], bool]) -> Iterator[str]:
        with self._dump.step(number) if self._dump is not None else contextlib.nullcontext():
            yield from self.conductor.stages(number, stop)
        self.pool.step_made()

    def adjust(self, changes: Mapping[str, float]) -> str:
        """Change settings between two steps, on every worker; later workers are built with the changed config."""
        if self.starter.is_here and self.config.learn.parallel.ranks > 1:
            return "ranks of cluster.executor=local cannot change settings during a run; those of processes can"
        if not (why := refusal(self.config, changes)):
            self.config = adjusted(self.config, changes)
            self._from_all(request(WorkerCommands.adjust, dict(changes)))
        return why

    def measure(self) -> dict[str, float]:
        told = self._from_all(request(WorkerCommands.measure), self.pool.acting)
        self._shown = {name: ids for name, (_, ids) in told.items()}
        of_samples = Counted.of_samples(self.run_dock.dock.counted())
        measured = together([*(counted for counted, _ in told.values()), of_samples])
        self.machines = {name: one.machine for name, (one, _) in told.items() if one.machine is not None}
        measured |= {"version": float(self.publisher.version)}
        state, rows = self.run_dock.dock.state(), samples_per_step(self.config)
        measured |= self.traffic.step(state, rows, self.publisher.nbytes)
        if self.conductor.schedule.lead:
            measured |= self.traffic.lost(state)
        if self.conductor.carry is not None:
            measured["carried_groups"] = float(len(self.feed_state["under_way"]))
        if not self.starter.is_here:
            heard, self.pool.received_bytes = self.pool.received_bytes, 0
            measured |= {"workers_lost": float(self.pool.lost_total), "driver_bytes": float(heard)}
        return measured

    def _from_all(self, asked: Request[R], members: Sequence[Member] | None = None) -> dict[str, R]:
        """Collect the answers of all workers, or of these; one that is lost meanwhile is left out."""
        futures = self.pool.ask_all(self.pool.ready if members is None else members, lambda _: asked).futures
        told: dict[str, R] = {}
        deadline = self.starter.now() + self.config.cluster.stall_s
        for name, future in futures.items():
            while not future.done():
                self.check_learners()
                self._give_up_late(name, asked.name, deadline)
                self.pool.pump(0.2)
            with contextlib.suppress(WorkerLost):
                told[name] = self.pool.unwrap(name, future)
        return told

    def _give_up_late(self, name: str, command: str, deadline: float) -> None:
        """Give up a worker that reports but hangs in its work, instead of waiting for it for ever."""
        member = self.pool.members.get(name)
        if self.starter.now() < deadline or member is None or member.state != "ready":
            return
        why = f"{name} did not come to {command!r} within {self.config.cluster.stall_s:g} s: it hangs"
        self.pool.lose(member, f"{why}{self.pool.examine(why)}")

    def after_step(self, step: int, measured: dict[str, float]) -> list[str]:
        told = self._from_all(request(WorkerCommands.after_step, step, dict(measured)), self.pool.acting)
        coefs = [c for c in told.values() if c is not None]
        if coefs:
            measured["kl_coef"] = self.kl_coef = coefs[0]
        if "curriculum" in self.feed_state:  # the curriculum changed with the step
            now = self.pool.call(self.feeder, request(WorkerCommands.feed_state))
            self.feed_state = self.feed_state | {"curriculum": now["curriculum"]}
        self._history = health.shortened([*self._history, measured])
        fresh = [sign for sign in health.signs(self._history) if sign.sign not in self._warned]
        self._warned |= {sign.sign for sign in fresh}
        return [sign.sentence for sign in fresh]

    def write_samples(self, step: int) -> str:
        """Let each worker write its own samples; the driver chooses them by id, those with a failed reward first."""
        owner = {sample: name for name, shown in self._shown.items() for sample in shown}
        chosen = sorted(owner)[: self.config.observe.samples_per_step]
        errors = []
        for name in dict.fromkeys(self._shown):
            member = self.pool.members.get(name)
            if member is not None and member.state == "ready":
                own = [sample[1] for sample in chosen if owner[sample] == name]
                written = request(WorkerCommands.write_samples, step, own, self.folder.samples_file.resolve())
                with contextlib.suppress(WorkerLost):
                    errors.append(self.pool.call(member, written))
        if chosen:
            noted = request(WorkerCommands.write_notes, step, [id for _, id in chosen], self.path)
            self._from_all(noted, self.pool.learners())
        return next((error for error in errors if error), "")

    def activity(self) -> Activity | None:
        reports = (member.report for member in self.pool.ready)
        if compiled := next((r.compiling for r in reports if r is not None and r.compiling), ""):
            return Activity(f"compiling {compiled}")
        if self.seen is None:
            return Activity("reading data")
        return what_it_is_at(self.seen, samples_per_step(self.config))

    def interrupt(self, member: Member) -> None:
        """Ask a worker to end the feeding or the evaluation under way."""
        if member.handle is not None and not self.starter.is_here:  # here the worker asks the driver
            member.handle.call(request(HostCommands.interrupt))

    def evaluate(self, size: int, samples: int, tell: Callable[[Activity], None] = lambda activity: None) -> Evaluation:
        self.tell = tell
        # a running mean of the weights belongs to the learner
        group = LEARNER if self.config.learn.ema else self.wiring.engines.name
        while True:
            self.check_learners()
            self.publisher.bring(self.publisher.newcomers())
            ready = self.pool.engines(group)
            if not ready:
                self.pool.pump(0.5)
                continue
            try:
                return evaluated(self, ready[0], size, samples)
            except WorkerLost as lost:
                self.note(f"evaluation begins again: {lost}")

    def save(
        self, folder: Path, step: int, state: dict[str, Any], *, best: bool = False, metric: float | None = None
    ) -> None:
        whole = {"feed": self.feed_state} | state
        is_last = step >= self.config.train.steps
        order = request(WorkerCommands.save, folder.resolve(), step, whole, best, metric, is_last)
        try:
            self.pool.call_all(self.pool.learners(), lambda _: order)
        except WorkerLost as lost:
            self.pool.pump(0.5)
            self.check_learners()
            raise TidemillError(f"the checkpoint of step {step} could not be written: {lost}") from lost

    def restore(self, path: Path) -> dict[str, Any]:
        told = self.pool.call_all(self.pool.learners(), lambda _: request(WorkerCommands.restore, path.resolve()))
        state = next(iter(told.values()))
        self.feed_state, self.conductor.refeed = feed_of(state), True
        self.kl_coef = state["kl"]["coef"] if "kl" in state else None
        self.publisher.publish()
        return state

    def keep_definition(self, run: Path) -> None:
        self.pool.call(self._holder(), request(WorkerCommands.keep_definition, run.resolve()))

    def save_model(self, folder: Path) -> None:
        self.pool.call(self._holder(), request(WorkerCommands.save_model, folder.resolve()))

    def _holder(self) -> Member:
        """Return a worker that has the whole current model."""
        if self.wiring.is_colocated or not self.wiring.learners.is_cut:
            return self.pool.learners()[0]
        while not (ready := self.pool.engines(ROLLOUT)) or self.publisher.newcomers():
            self.check_learners()
            self.publisher.bring(self.publisher.newcomers())
            self.pool.pump(0.2)
        return ready[0]

    def _settle(self) -> None:
        """Finish a checkpoint that is being written, whatever ends the run."""
        if self.is_up and not self._lost_learner:
            try:
                self.pool.call_all(self.pool.learners(), lambda _: request(WorkerCommands.settle), SETTLE_S)
            except (TidemillError, WorkerLost) as error:
                self.note(f"a checkpoint was not finished: {error}")

    def close(self) -> None:
        self._settle()
        if self.is_up and self.conductor.number >= self.config.train.steps:
            with contextlib.suppress(OSError):  # a full disk must not keep workers from being ended
                self.look(is_over=True)
        self.pool.close()
        self._end_stacks()
        if self._logs is not None:
            self._logs.close()
        self.run_dock.close()


def feed_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the data position before the first step to be made. Older checkpoints, which held the dock's rows,
    stood after the steps ahead, whose samples are made again."""
    feed: dict[str, Any] = state["feed"]
    if not state.get("ahead"):
        return feed
    first = min(first_group for first_group, _ in state["ahead"].values())
    return feed | {"position": feed["position"] - (feed["groups"] - first), "groups": first}
