"""Examines a stall: who waits for whom and since when, with everybody's stacks, and who may be the cause."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.cluster.commands import HostCommands, request
from tidemill.cluster.driver import status
from tidemill.cluster.driver.worker_pool import Member, WorkerPool
from tidemill.cluster.report import WorkerReport
from tidemill.dock import DockState
from tidemill.observe.lock import lives

ASK_S = 3.0  # for a worker's own stacks, before an attempt from outside
LOOK_S = 20.0  # for stacks from outside on another machine


@dataclass(frozen=True, slots=True)
class Stall:
    sentences: tuple[str, ...]
    file: Path  # the whole report, with stacks
    culprit: str | None  # the worker that hangs, if any
    why: str = ""


def examine(pool: WorkerPool, state: DockState, seconds: float) -> Stall:
    members = list(pool.members.values())
    workers = [status.of_member(m) for m in members]
    told = status.who_waits(workers, status.stages_of(state))
    culprit, why = blame(members, seconds)
    if culprit is not None:
        told.insert(0, why)
    file = report(pool, pool.logs, [f"nothing has moved for {seconds:.0f} s", *told])
    return Stall(tuple(told), file, culprit, why)


def blame(members: Sequence[Member], seconds: float) -> tuple[str | None, str]:
    """Find a rank that others wait for in an operation; else a worker that has done one thing for as long as nothing
    moved."""
    reports = [(m, m.report) for m in members if m.state == "ready" and m.report is not None]
    for peers in _worlds(reports):
        waiting = [r for _, r in peers if r.operation]
        late = [m for m, r in peers if not r.operation]
        if waiting and late:
            first = max(waiting, key=lambda r: r.operation_s)
            at = late[0].report.doing if late[0].report else "nothing known"
            what = (
                f"{late[0].name} is missing in the {first.operation} since {first.operation_s:.0f} s "
                f"(it is at {at or 'nothing'})"
            )
            return late[0].name, what
    for m, r in reports:
        age = r.since_s + time.monotonic() - m.heard
        if r.doing and age > 0.8 * seconds:
            return m.name, f"{m.name} has been doing {r.doing} for {age:.0f} s"
    silent = [m for m in members if m.state == "ready" and time.monotonic() - m.heard > 0.8 * seconds]
    if silent:
        return silent[0].name, f"{silent[0].name} has not reported for {time.monotonic() - silent[0].heard:.0f} s"
    return None, ""


def _worlds(reports: Sequence[tuple[Member, WorkerReport]]) -> list[list[tuple[Member, WorkerReport]]]:
    """Group workers that wait for each other in operations: the learners, and the ranks of each engine."""
    found: dict[str, list[tuple[Member, WorkerReport]]] = {}
    for member, told in reports:
        if world := status.world_of(member):
            found.setdefault(world, []).append((member, told))
    return list(found.values())


def report(pool: WorkerPool, logs: Path, head: Sequence[str]) -> Path:
    """Write everybody's stacks into one file."""
    logs.mkdir(parents=True, exist_ok=True)
    number = len(list(logs.glob("stall-*.txt"))) + 1
    file = logs / f"stall-{number}.txt"
    members = list(pool.members.values())
    asked = {m.name: m.handle.call(request(HostCommands.stacks)) for m in members if m.handle is not None}
    parts = [*head, ""]
    deadline = time.monotonic() + ASK_S
    for m in members:
        parts += [f"== {m.name} ({m.state}, pid {m.pid}, {m.host})", _told(asked.get(m.name), deadline, m, logs), ""]
    file.write_text("\n".join(parts))
    return file


def _told(asked: Future[Any] | None, deadline: float, member: Member, logs: Path) -> str:
    if asked is None:
        return "no process"
    try:
        return str(asked.result(max(0.0, deadline - time.monotonic())).value)
    except Exception as error:  # it hangs in a call that holds the interpreter, or is gone
        return _from_outside(member, logs) or f"no answer: {error}"


def _from_outside(member: Member, logs: Path) -> str:
    """Return its process's stacks, requested on its own machine; "" when the process is gone."""
    if status.is_own(member.host):
        there = member.pid and lives(member.pid)
        return status.stacks_of(member.pid, logs / f"{member.name}.stacks") if there else ""
    assert member.handle is not None
    try:
        return str(member.handle.call(request(HostCommands.look)).result(LOOK_S).value)
    except Exception:  # its machine does not answer, either
        return ""
