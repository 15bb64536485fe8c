"""The driver's side of the workers: starts them, receives their reports, replaces lost ones. The driver is one thread.
All its waiting happens in `pump`: reports come in, lost workers are started again after a growing pause, and a worker
that cannot be started ends the run with its own last error."""

from __future__ import annotations

import pickle
import queue
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from tidemill.cluster.commands import HostCommands, Request, request
from tidemill.cluster.driver.answers import Answers
from tidemill.cluster.report import Answer, Failure, WorkerReady, WorkerReport
from tidemill.cluster.start.handle import Handle, Starter, WorkerLost
from tidemill.cluster.wiring import LEARNER, Post, Wiring
from tidemill.errors import TidemillError
from tidemill.flow.workers import Stopped
from tidemill.recipe.config import Cluster

SILENCE_S = 15.0  # at least this long without a report before a worker counts as lost: busy machines are slow
FAILED_STARTS = 3  # failed starts in a row that end the run
LOOK_S = 0.05  # between checks for silent workers and for those due to start again
PAUSE_S = (0.2, 15.0)  # pause before a lost worker is started again: at first, at most
TAIL = 12  # last lines of a log, which say why a worker ended
State = Literal["starting", "ready", "lost", "gone"]
R = TypeVar("R")


@dataclass(slots=True, eq=False)
class Member:
    post: Post
    state: State = "starting"
    handle: Handle | None = None
    incarnation: int = 0
    node: str = ""
    host: str = ""
    pid: int = 0
    report: WorkerReport | None = None
    heard: float = 0.0
    since: float = 0.0  # of its state
    failed_starts: int = 0
    losses: int = 0  # since the last step
    restarts: int = 0
    not_before: float = 0.0
    last_error: str = ""
    dock: str = ""  # the dock it was sent to
    name: str = field(init=False)  # the post's, asked for thousands of times a step
    learns: bool = field(init=False)
    leads: bool = field(init=False)
    acts: bool = field(init=False)
    engine: tuple[str, int] = field(init=False)  # its group, and which of the group's engines it is a part of

    def __post_init__(self) -> None:
        post = self.post
        self.name, self.learns, self.leads, self.acts = post.name, post.group.learns, post.leads, post.acts
        self.engine = post.group.name, post.engine


class WorkerPool:
    """`build` makes a started process a worker and returns the future of its readiness; `on_ready` is called for
    each that comes up; `on_lost` for each that is lost, and returns whether to start it again."""

    def __init__(
        self,
        settings: Cluster,
        wiring: Wiring,
        starter: Starter,
        logs: Path,
        note: Callable[[str], None],
        build: Callable[[Member], Future[Any]],
        on_ready: Callable[[Member], None],
        on_lost: Callable[[Member, str], bool],
    ) -> None:
        self.settings, self.wiring, self.starter, self.logs, self.note = settings, wiring, starter, logs, note
        now = starter.now()
        self.members = {post.name: Member(post, heard=now, since=now) for post in wiring.posts}
        self.spent = 0  # workers replaced since the last step
        self.lost_total = 0
        self.changes = 0  # of who is there, and in which state
        self.moves = 0  # times that a worker was heard to have moved on
        self._by_group: dict[str, list[Member]] = {}
        self._by_engine: dict[tuple[str, int], list[Member]] = {}
        self._looked, self._calm_at = 0.0, -1
        self._spawned = 0
        self.received_bytes = 0  # of all answers, as sent
        self._build, self._on_ready, self._on_lost = build, on_ready, on_lost
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.is_closing = False
        self.check: Callable[[], None] = lambda: None  # raises when waiting for an answer is pointless
        self.examine: Callable[[str], str] = lambda why: ""  # writes everybody's stacks to a file, and returns its name

    # Who is there

    def of(self, group: str, *, ready: bool = True) -> list[Member]:
        return [m for m in self._group(group) if m.state == "ready" or not ready]

    def _group(self, name: str) -> list[Member]:
        self._sort()
        return self._by_group.get(name, [])

    def _sort(self) -> None:
        """Find who is together, after members have come or gone."""
        if self._by_group:
            return
        self._by_engine = {}
        for member in self.members.values():
            self._by_group.setdefault(member.post.group.name, []).append(member)
            self._by_engine.setdefault(member.engine, []).append(member)
        for mates in self._by_engine.values():
            mates.sort(key=lambda member: member.post.rank)

    @property
    def ready(self) -> list[Member]:
        return [m for m in self.members.values() if m.state == "ready"]

    def learners(self) -> Sequence[Member]:
        return self._group(LEARNER)

    @property
    def acting(self) -> list[Member]:
        """Those who have something to do of their own: not the ranks of an engine that follow its first."""
        return [m for m in self.members.values() if m.state == "ready" and m.acts]

    def become(self, member: Member, state: State) -> None:
        member.state, member.since = state, self.starter.now()
        self.changes += 1

    def mates(self, member: Member) -> list[Member]:
        """Return the members that share an engine with it, itself included, first rank first."""
        self._sort()
        return list(self._by_engine.get(member.engine, ()))

    def engines(self, group: str) -> list[Member]:
        """Return the first ranks of complete engines."""
        leaders = [m for m in self.of(group) if m.leads]
        return [m for m in leaders if self.is_complete(m)]

    def is_complete(self, member: Member) -> bool:
        mates = self.mates(member)
        return len(mates) == member.post.group.engine_ranks and all(m.state == "ready" for m in mates)

    def complete(self, members: Iterable[Member]) -> list[Member]:
        """Of these, the ranks of engines that are whole."""
        known: dict[tuple[str, int], bool] = {}
        found = []
        for member in members:
            is_whole = known.get(member.engine)
            if is_whole is None:
                is_whole = known[member.engine] = self.is_complete(member)
            if is_whole:
                found.append(member)
        return found

    # Starting

    def start(self, names: Iterable[str]) -> None:
        for name in names:
            self._spawn(self.members[name])

    def wait_ready(self, names: Sequence[str]) -> None:
        """Wait for those that are still members: one that finds no place, and is not needed, is given up meanwhile."""
        deadline = self.starter.now() + self.settings.start_s
        while late := [n for n in names if n in self.members and self.members[n].state != "ready"]:
            if self.starter.now() > deadline and not self._do_without(late):
                raise TidemillError(
                    f"{', '.join(late)} did not start within {self.settings.start_s:g} s",
                    f"see {self.logs}; raise cluster.start_s if the model is large",
                )
            self.pump(0.5)

    def _do_without(self, names: Sequence[str]) -> bool:
        """Give these up if others do the same work; return whether all could be."""
        for name in names:
            member = self.members.get(name)
            if member is not None and self._is_spare(member):
                self._give_up(member)
        return not any(name in self.members for name in names)

    def _give_up(self, member: Member) -> None:
        for mate in self.mates(member):
            self.note(f"{mate.name} finds no place; the run continues without it")
            self.remove(mate.name)

    def add(self, post: Post) -> Member:
        """Add a worker during the run."""
        now = self.starter.now()
        member = self.members[post.name] = Member(post, heard=now, since=now)
        self._by_group = {}
        self._spawn(member)
        return member

    def remove(self, name: str) -> None:
        """Remove a worker for good: what it holds goes to others."""
        member = self.members.pop(name)
        self._by_group = {}
        self.become(member, "gone")
        if member.handle is not None:
            member.handle.kill()
        self.starter.release(member.post)

    def _spawn(self, member: Member) -> None:
        self.become(member, "starting")
        self._spawned += 1
        member.incarnation = self._spawned  # unique among all workers: a new one of an old name is not mistaken for it
        member.node = ""
        member.report, member.heard = None, self.starter.now()
        member.handle = self.starter.spawn(member.post, self.logs)
        self._then(member, member.handle.call(request(HostCommands.where)), lambda place: self._placed(member, place))

    def _placed(self, member: Member, place: tuple[str, str]) -> None:
        member.node, member.host = place
        self._then(member, self._build(member), lambda ready: self._is_ready(member, ready))

    def _is_ready(self, member: Member, ready: WorkerReady) -> None:
        member.pid, member.failed_starts, member.heard = ready.pid, 0, self.starter.now()
        self.become(member, "ready")
        self._watch(member)
        self._on_ready(member)

    def _watch(self, member: Member) -> None:
        assert member.handle is not None
        seen = member.report.serial if member.report is not None else 0
        watched = member.handle.call(request(HostCommands.watch, seen, self.starter.watch_s))
        self._then(member, watched, lambda report: self._heard(member, report))

    def _heard(self, member: Member, report: WorkerReport) -> None:
        self.moves += member.report is None or member.report.moves != report.moves
        member.report, member.heard = report, self.starter.now()
        if report.failure is not None:
            self._failed(member, report.failure)
        elif member.state == "ready":
            self._watch(member)

    # Losing

    def step_made(self) -> None:
        """Reset the budget of losses, and the pauses after them."""
        self.spent = 0
        for member in self.members.values():
            member.losses = 0

    def lose(self, member: Member, why: str) -> None:
        """Count a worker as lost, and end its process."""
        if member.state in ("lost", "gone") or self.is_closing:
            return
        if member.state == "starting":
            member.failed_starts += 1
        member.last_error = why
        self.become(member, "lost")
        self.lost_total += 1
        if member.handle is not None:
            member.handle.kill()
        self.note(f"{member.name} is lost: {why.splitlines()[0] if why else 'no reason given'}")
        if member.failed_starts >= FAILED_STARTS:
            raise TidemillError(
                f"{member.name} dies at every start ({member.failed_starts} times): {self._own_words(member)}",
                f"its log is {self.logs / member.name}.log",
            )
        self.spent += 1
        member.losses += 1
        if self.spent > self.settings.restarts:
            raise TidemillError(
                f"{self.spent} workers were lost within one step, the last {member.name}: {self._own_words(member)}",
                f"its log is {self.logs / member.name}.log; cluster.restarts is the limit",
            )
        member.not_before = self.starter.now() + min(PAUSE_S[1], PAUSE_S[0] * 2 ** (member.losses - 1))
        if not self._on_lost(member, why):
            member.not_before = float("inf")  # the driver decides when
        if member.post.group.restart == "engine":
            for mate in self.mates(member):
                self._lose_with(mate, member)

    def _lose_with(self, mate: Member, lost: Member) -> None:
        """End the other ranks of its engine, which are useless without it. Counted as one loss."""
        if mate.state == "ready":
            mate.last_error = f"{lost.name}, which shares its engine, is lost"
            self.become(mate, "lost")
            mate.not_before = lost.not_before
            if mate.handle is not None:
                mate.handle.kill()

    def again(self, member: Member) -> None:
        """Start a lost worker anew."""
        member.restarts += 1
        self.starter.release(member.post)
        self._spawn(member)

    def _failed(self, member: Member, failure: Failure) -> None:
        if failure.is_users:
            raise failure.raised(member.name)
        self.lose(member, f"{failure.message}\n{failure.trace}")

    def _own_words(self, member: Member) -> str:
        """Return the worker's own last error: what it reported, or the end of its log."""
        log = self.logs / f"{member.name}.log"
        lines = log.read_text(errors="replace").splitlines()[-TAIL:] if log.exists() else []
        return "\n".join([member.last_error.splitlines()[0] if member.last_error else "", *lines]).strip()

    # Hearing

    def pump(self, wait_s: float) -> None:
        """Process events for at most `wait_s`: until there was one."""
        wait_s = self.starter.work(wait_s)  # of workers on this thread, who wait by themselves
        if not self.starter.is_here:
            self._look()
        try:
            event = self._events.get(timeout=wait_s) if wait_s > 0 else self._events.get_nowait()
            while True:
                if event is not None:
                    event()
                event = self._events.get_nowait()
        except queue.Empty:
            return

    def _look(self) -> None:
        now = self.starter.now()
        if now - self._looked < LOOK_S or self._calm_at == self.changes:
            return
        self._looked = now
        silence_s = self.starter.watch_s + max(SILENCE_S, 2 * self.settings.lease_s)
        for member in list(self.members.values()):
            if member.state == "gone":
                continue
            if member.state == "lost" and now >= member.not_before:
                self.again(member)
            elif member.state == "ready" and now - member.heard > silence_s:
                seen = self.examine(f"{member.name} has been silent for {now - member.heard:.0f} s")
                self.lose(member, f"silent for {now - member.heard:.0f} s: it hangs, or its node does{seen}")
            elif member.state == "starting" and now - member.since > self.settings.start_s:
                if self._is_spare(member):
                    self._give_up(member)
                    continue
                self.lose(member, f"not ready after {self.settings.start_s:g} s")
        if self.starter.watch_s == float("inf") and all(m.state == "ready" for m in self.members.values()):
            self._calm_at = self.changes  # until then nobody is silent, and nobody is due

    def _is_spare(self, member: Member) -> bool:
        """Say whether it was never placed, as after the loss of its node, while others do the same work."""
        group = member.post.group.name
        is_needed = member.post.group.learns or member.post.feeds
        return not member.node and not is_needed and bool(self.engines(group))

    def call(
        self,
        member: Member,
        asked: Request[R],
        within_s: float = 600.0,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> R:
        return self.call_all([member], lambda _: asked, within_s, meanwhile)[member.name]

    def call_all(
        self,
        members: Sequence[Member],
        asked: Callable[[Member], Request[R]],
        within_s: float = 600.0,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> dict[str, R]:
        """Return each one's answer. Raises `WorkerLost` when one is lost or late, and a `Failure` as its exception."""
        answers = self.ask_all(members, asked)
        deadline = self.starter.now() + within_s
        while not answers.are_in:
            self.check()
            meanwhile()
            if self.starter.now() > deadline:
                late = answers.missing()
                what = next(asked(m).name for m in members if m.name == late[0])
                raise WorkerLost(f"{', '.join(late)} did not finish {what!r} within {within_s:g} s")
            self.pump(0.2)
        values: dict[int, R] = {}  # by future: one may answer for thousands
        told = {}
        for name, future in answers.found():
            if id(future) not in values:
                values[id(future)] = self.unwrap(name, future)
            told[name] = values[id(future)]
        return told

    def ask_all(self, members: Iterable[Member], asked: Callable[[Member], Request[Any]]) -> Answers:
        """Send without waiting; the driver wakes with each answer."""
        futures = {
            m.name: m.handle.call(asked(m)) if m.handle is not None and m.state == "ready" else _gone(m)
            for m in members
        }
        return Answers(futures, self._events)

    def send(self, member: Member, asked: Request[Any]) -> Future[Any]:
        """Send without waiting; the driver wakes when it is done."""
        if member.handle is None or member.state != "ready":
            return _gone(member)
        future = member.handle.call(asked)
        future.add_done_callback(self._wake)
        return future

    def _wake(self, _: Future[Any]) -> None:
        self._events.put(None)

    def unwrap(self, name: str, future: Future[Any]) -> Any:
        answer: Answer = future.result()
        self._count(answer)
        if answer.failure is None:
            return answer.value
        if answer.failure.kind == Stopped.__name__:
            raise Stopped
        if answer.failure.is_users:
            raise answer.failure.raised(name)
        raise WorkerLost(f"{name}: {answer.failure.message}")

    def _then(self, member: Member, future: Future[Any], follow: Callable[[Any], None]) -> None:
        """Call `follow` with the answer, on the driver's thread, if the same process still answers."""
        incarnation = member.incarnation

        def event() -> None:
            if member.incarnation != incarnation or self.is_closing:
                return
            try:
                answer = future.result()
            except WorkerLost as lost:
                self.lose(member, str(lost))
                return
            if isinstance(answer, Answer):
                if answer.failure is not None:
                    self._failed(member, answer.failure)
                    return
                self._count(answer)
                answer = answer.value
            follow(answer)

        future.add_done_callback(lambda _: self._events.put(event))

    def _count(self, answer: Answer) -> None:
        if self.starter.has_processes:  # else nothing is sent
            self.received_bytes += len(pickle.dumps(answer.value))

    def close(self) -> None:
        self.is_closing = True
        for member in self.members.values():
            if member.handle is not None:
                member.handle.kill()
        self.starter.close()


def _gone(member: Member) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(WorkerLost(f"{member.name} is not there"))
    return future
