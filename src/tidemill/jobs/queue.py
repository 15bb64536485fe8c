"""The queue: add jobs, look at them, cancel them, and run them in order until told to end.

The journal is all it remembers. It may be killed at any instant and started again: jobs that run go on meanwhile, and
the next queue finds them by their folders.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from tidemill.errors import ConfigError
from tidemill.jobs import state
from tidemill.jobs.journal import Journal
from tidemill.jobs.runner import Runner
from tidemill.jobs.state import Job, Jobs, Preempt, Spec
from tidemill.observe.lock import Lock

TICK_S = 0.1
GRACE_S = 300.0  # from being asked to save until being killed


class Queue:
    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser().resolve()
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"--queue {folder} is a file", "name the queue's folder; a new one is made")
        self._journal = Journal(self.folder / "journal.jsonl")
        self.jobs: Jobs = {}
        self.refresh()

    def refresh(self) -> None:
        for event in self._journal.read():
            state.apply(self.jobs, event)

    def add(self, spec: Spec) -> int:
        spec = replace(spec, folder=str(Path(spec.folder).resolve()))
        number = self._journal.add(lambda number: {"event": "add", "id": number, "spec": asdict(spec)})
        self.refresh()
        return number

    def cancel(self, number: int) -> Job:
        if number not in self.jobs:
            raise ConfigError(f"the queue has no job {number}", "`tidemill jobs list` shows them")
        if self.jobs[number].phase in ("waiting", "running"):
            self._tell("cancel", number)
        return self.jobs[number]

    def run(
        self,
        runner: Runner,
        slots: int = 1,
        limits: Mapping[str, int] | None = None,
        *,
        is_drain: bool = False,
        grace_s: float = GRACE_S,
        tick_s: float = TICK_S,
    ) -> None:
        """Run jobs until interrupted, or until none is left (`is_drain`). One process at a time may do so."""
        lock = Lock.take(self.folder / "lock")
        asked: dict[tuple[int, int], float] = {}  # when an attempt was asked to save
        try:
            while True:
                self.step(runner, slots, limits or {}, asked, grace_s)
                if is_drain and not self._is_busy(slots):
                    return
                time.sleep(tick_s)
        finally:
            lock.release()

    def step(
        self,
        runner: Runner,
        slots: int,
        limits: Mapping[str, int],
        asked: dict[tuple[int, int], float],
        grace_s: float = GRACE_S,
    ) -> None:
        """One round: hear what was added, collect what ended, ask who must leave, start who may."""
        self.refresh()
        for job in [job for job in self.jobs.values() if job.phase == "running"]:
            self._collect(job, runner)
            if job.phase == "running" and (job.is_preempted or job.is_cancelled):
                _press(job, runner, asked, grace_s)
        for action in state.decide(self.jobs, slots, limits):
            job = self.jobs[action.id]
            if isinstance(action, Preempt):
                self._tell("preempt", action.id, attempt=job.attempt)
                _press(job, runner, asked, grace_s)
            else:  # journal first: a queue killed in between finds an attempt that was not begun, and begins it
                self._tell("start", action.id, attempt=job.attempt + 1, slots=list(action.slots))
                runner.start(job)

    def _collect(self, job: Job, runner: Runner) -> None:
        outcome = runner.look(job)
        if outcome == "running":
            return
        if outcome == "not begun":
            runner.start(job)
            return
        self._tell("end", job.id, attempt=job.attempt, code=None if outcome == "lost" else outcome)

    def _tell(self, event: str, number: int, **more: object) -> None:
        self._journal.append({"event": event, "id": number, **more})
        self.refresh()

    def _is_busy(self, slots: int) -> bool:
        return any(j.phase == "running" or (j.phase == "waiting" and j.spec.slots <= slots) for j in self.jobs.values())


def _press(job: Job, runner: Runner, asked: dict[tuple[int, int], float], grace_s: float) -> None:
    """Ask an attempt once to save and end; kill it when its grace is over."""
    key, now = (job.id, job.attempt), time.monotonic()
    if key not in asked:
        if runner.ask(job):
            asked[key] = now
    elif now - asked[key] > grace_s:
        runner.kill(job)
