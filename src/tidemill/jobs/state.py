"""The queue's rules, without clocks, files or processes: what events mean, and what to do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

STOPPED = 75  # a run that saved and ended before its last step exits with this
Phase = Literal["waiting", "running", "done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Spec:
    """What was asked for. Only a resumable job may be preempted, or run again after it was killed."""

    command: tuple[str, ...]
    name: str = ""
    priority: int = 0
    slots: int = 1
    group: str = ""
    is_resumable: bool = False
    folder: str = "."
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Job:
    id: int
    spec: Spec
    phase: Phase = "waiting"
    attempt: int = 0
    slots: tuple[int, ...] = ()  # which of the machine's slots it has while it runs
    is_preempted: bool = False
    is_cancelled: bool = False
    code: int | None = None


@dataclass(frozen=True, slots=True)
class Start:
    id: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Preempt:
    id: int


Jobs = dict[int, Job]


def apply(jobs: Jobs, event: Mapping[str, Any]) -> None:
    """Change the jobs by one event of the journal."""
    kind, number = event["event"], event["id"]
    if kind == "add":
        given = event["spec"]
        jobs[number] = Job(number, Spec(**given | {"command": tuple(given["command"])}))
        return
    job = jobs[number]
    if kind == "start":
        job.phase, job.attempt, job.slots = "running", event["attempt"], tuple(event["slots"])
        job.is_preempted = False
    elif kind == "preempt":
        job.is_preempted = True
    elif kind == "cancel":
        job.is_cancelled = True
        if job.phase == "waiting":
            job.phase = "cancelled"
    elif kind == "end" and job.phase == "running" and event["attempt"] == job.attempt:
        job.code, job.slots = event["code"], ()
        job.phase = _after(job)


def _after(job: Job) -> Phase:
    """Where a job goes when an attempt has ended; a code of None says that it was killed without a trace."""
    if job.code == 0:
        return "done"
    if job.is_cancelled:
        return "cancelled"
    if job.spec.is_resumable and (job.is_preempted or job.code in (None, STOPPED)):
        return "waiting"
    return "failed"


def in_order(jobs: Iterable[Job]) -> list[Job]:
    """Higher priority first, then who came first; a preempted job keeps its place."""
    return sorted(jobs, key=lambda job: (-job.spec.priority, job.id))


def decide(jobs: Jobs, slots: int, limits: Mapping[str, int]) -> list[Start | Preempt]:
    """What to start and to preempt now. Nothing overtakes the first job that waits for room; a job whose group is at
    its limit, or that asks for more than there is, is passed by."""
    running = [job for job in jobs.values() if job.phase == "running"]
    free = sorted(set(range(slots)) - {slot for job in running for slot in job.slots})
    counts = Counter(job.spec.group for job in running)
    actions: list[Start | Preempt] = []
    for job in in_order(job for job in jobs.values() if job.phase == "waiting"):
        group = job.spec.group
        is_at_limit = group in limits and counts[group] >= limits[group]
        if is_at_limit or job.spec.slots > slots:
            continue
        if job.spec.slots > len(free):
            return actions + _make_room(job, running, len(free))
        actions.append(Start(job.id, tuple(free[: job.spec.slots])))
        free = free[job.spec.slots :]
        counts[group] += 1
    return actions


def _make_room(job: Job, running: Sequence[Job], free: int) -> list[Start | Preempt]:
    """Preempt the lowest priorities first, the youngest first among them; nobody if that would not be enough."""
    missing = job.spec.slots - free - sum(len(r.slots) for r in running if r.is_preempted or r.is_cancelled)
    may = [r for r in running if r.spec.is_resumable and r.spec.priority < job.spec.priority]
    chosen: list[Start | Preempt] = []
    for victim in sorted(may, key=lambda r: (r.spec.priority, -r.id)):
        if missing <= 0:
            break
        if not victim.is_preempted and not victim.is_cancelled:
            chosen.append(Preempt(victim.id))
            missing -= len(victim.slots)
    return chosen if missing <= 0 else []
