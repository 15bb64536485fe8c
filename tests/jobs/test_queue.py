"""The queue's rules and its processes: order, limits, preemption, and what a kill leaves."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.errors import ConfigError
from tidemill.jobs import state
from tidemill.jobs.journal import Journal
from tidemill.jobs.queue import Queue
from tidemill.jobs.recipe import parse_limits
from tidemill.jobs.runner import Outcome, Processes, marked
from tidemill.jobs.state import Job, Preempt, Spec, Start

TRUE = ("true",)


class Fake:
    """A runner whose attempts end when the test says so."""

    def __init__(self) -> None:
        self.outcomes: dict[tuple[int, int], Outcome] = {}
        self.started: list[tuple[int, int]] = []
        self.asked: list[int] = []
        self.killed: list[int] = []

    def start(self, job: Job) -> None:
        self.started.append((job.id, job.attempt))
        self.outcomes[job.id, job.attempt] = "running"

    def look(self, job: Job) -> Outcome:
        return self.outcomes.get((job.id, job.attempt), "not begun")

    def ask(self, job: Job) -> bool:
        self.asked.append(job.id)
        return True

    def kill(self, job: Job) -> None:
        self.killed.append(job.id)


def jobs_of(*specs: Spec) -> state.Jobs:
    return {number: Job(number, spec) for number, spec in enumerate(specs, 1)}


def running(job: Job, *slots: int) -> None:
    job.phase, job.slots = "running", slots


def step(queue: Queue, fake: Fake, slots: int = 1, **limits: int) -> None:
    queue.step(fake, slots, limits, {})


# Decisions


def test_higher_priority_goes_first_and_equals_go_in_the_order_they_came() -> None:
    jobs = jobs_of(Spec(TRUE), Spec(TRUE, priority=2), Spec(TRUE, priority=2))
    assert state.decide(jobs, 2, {}) == [Start(2, (0,)), Start(3, (1,))]


def test_nothing_overtakes_the_first_job_that_waits_for_room() -> None:
    jobs = jobs_of(Spec(TRUE), Spec(TRUE, priority=1, slots=2), Spec(TRUE))
    running(jobs[1], 0)
    assert state.decide(jobs, 2, {}) == []


def test_a_job_that_asks_for_more_than_there_is_stands_in_nobodys_way() -> None:
    assert state.decide(jobs_of(Spec(TRUE, slots=9), Spec(TRUE)), 2, {}) == [Start(2, (0,))]


def test_a_group_at_its_limit_is_passed_by() -> None:
    jobs = jobs_of(*[Spec(TRUE, group="a", priority=1)] * 2, Spec(TRUE, group="b"))
    assert state.decide(jobs, 3, {"a": 1}) == [Start(1, (0,)), Start(3, (1,))]


def test_the_lowest_priority_makes_room_and_only_as_many_as_needed() -> None:
    jobs = jobs_of(*[Spec(TRUE, priority=p, is_resumable=True) for p in (1, 0, 2)], Spec(TRUE, priority=5, slots=2))
    for slot, number in enumerate((1, 2, 3)):
        running(jobs[number], slot)
    assert state.decide(jobs, 3, {}) == [Preempt(2), Preempt(1)]


def test_a_job_that_cannot_resume_is_not_preempted_nor_is_anybody_in_vain() -> None:
    jobs = jobs_of(Spec(TRUE), Spec(TRUE, is_resumable=True), Spec(TRUE, priority=5, slots=2))
    running(jobs[1], 0)
    running(jobs[2], 1)
    assert state.decide(jobs, 2, {}) == []


def test_room_that_is_already_being_made_is_counted() -> None:
    jobs = jobs_of(*[Spec(TRUE, is_resumable=True)] * 2, Spec(TRUE, priority=5))
    running(jobs[1], 0)
    running(jobs[2], 1)
    jobs[2].is_preempted = True
    assert state.decide(jobs, 2, {}) == []


# The journal


def test_a_line_cut_short_never_happened_and_the_next_one_stands_alone(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    file.write_text('{"event": "add", "id": 1}\n{"event": "sta')
    journal = Journal(file)
    assert journal.read() == [{"event": "add", "id": 1}]
    journal.append({"event": "cancel", "id": 1})
    assert Journal(file).read() == [{"event": "add", "id": 1}, {"event": "cancel", "id": 1}]


def test_two_queues_on_one_journal_never_give_one_number_twice(tmp_path: Path) -> None:
    one, other = Queue(tmp_path), Queue(tmp_path)
    assert [
        one.add(Spec(TRUE)),
        other.add(Spec(TRUE)),
        one.add(Spec(("echo", '"event": "add"'))),
        other.add(Spec(TRUE)),
    ]
    assert sorted(Queue(tmp_path).jobs) == [1, 2, 3, 4]


# The queue with a fake runner


def test_a_preempted_job_saves_waits_and_goes_on_in_its_old_place(tmp_path: Path) -> None:
    queue, fake = Queue(tmp_path), Fake()
    queue.add(Spec(TRUE, is_resumable=True))
    step(queue, fake)
    queue.add(Spec(TRUE, is_resumable=True))
    queue.add(Spec(TRUE, priority=1))
    step(queue, fake)
    assert fake.asked == [1] and fake.started == [(1, 1)]
    fake.outcomes[1, 1] = state.STOPPED
    step(queue, fake)
    fake.outcomes[3, 1] = 0
    step(queue, fake)
    assert fake.started == [(1, 1), (3, 1), (1, 2)]


def test_a_preempted_job_that_ends_by_itself_is_done(tmp_path: Path) -> None:
    queue, fake = Queue(tmp_path), Fake()
    queue.add(Spec(TRUE, is_resumable=True))
    step(queue, fake)
    queue.add(Spec(TRUE, priority=1))
    step(queue, fake)
    fake.outcomes[1, 1] = 0
    step(queue, fake)
    assert queue.jobs[1].phase == "done" and fake.started[-1] == (3 - 1, 1)


def test_a_new_queue_takes_over_what_runs_and_begins_what_was_not_begun(tmp_path: Path) -> None:
    old, fake = Queue(tmp_path), Fake()
    old.add(Spec(TRUE))
    old.add(Spec(TRUE))
    step(old, fake, slots=2)
    del fake.outcomes[2, 1]  # the queue was killed between the journal and the process
    new = Queue(tmp_path)
    step(new, fake, slots=2)
    assert fake.started == [(1, 1), (2, 1), (2, 1)]


def test_a_job_killed_without_a_trace_runs_again_only_if_it_can_resume(tmp_path: Path) -> None:
    queue, fake = Queue(tmp_path), Fake()
    queue.add(Spec(TRUE, is_resumable=True))
    queue.add(Spec(TRUE))
    step(queue, fake, slots=2)
    fake.outcomes = {(1, 1): "lost", (2, 1): "lost"}
    step(queue, fake, slots=2)
    assert fake.started[2:] == [(1, 2)] and queue.jobs[2].phase == "failed"


def test_a_cancelled_job_is_asked_then_killed_when_its_grace_is_over(tmp_path: Path) -> None:
    queue, fake = Queue(tmp_path), Fake()
    queue.add(Spec(TRUE))
    queue.add(Spec(TRUE))
    asked: dict[tuple[int, int], float] = {}
    queue.step(fake, 1, {}, asked)
    assert queue.cancel(2).phase == "cancelled"
    queue.cancel(1)
    queue.step(fake, 1, {}, asked, grace_s=60)
    assert (fake.asked, fake.killed) == ([1], [])
    queue.step(fake, 1, {}, asked, grace_s=-1)
    fake.outcomes[1, 1] = 137
    queue.step(fake, 1, {}, asked)
    assert fake.killed == [1] and queue.jobs[1].phase == "cancelled"


def test_an_unknown_job_and_a_malformed_limit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no job 7"):
        Queue(tmp_path).cancel(7)
    with pytest.raises(ConfigError, match="GROUP=K"):
        parse_limits(["alice"])
    assert parse_limits(["alice=2"]) == {"alice": 2}


# Processes


def wait_for(is_so: Callable[[], object], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_jobs_run_once_and_their_failures_are_told(tmp_path: Path) -> None:
    queue = Queue(tmp_path / "queue")
    lines = tmp_path / "lines"
    queue.add(Spec(("sh", "-c", f"echo $TIDEMILL_SLOTS >>{lines}"), folder=str(tmp_path)))
    queue.add(Spec(("sh", "-c", "exit 3"), folder=str(tmp_path)))
    queue.add(Spec(("no-such-program",), folder=str(tmp_path)))
    queue.run(Processes(tmp_path / "jobs"), 1, is_drain=True, tick_s=0.02)
    assert lines.read_text() == "0\n"
    assert [(job.phase, job.code) for job in queue.jobs.values()] == [("done", 0), ("failed", 3), ("failed", 127)]


def test_two_keepers_of_one_attempt_run_its_command_once(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    job = Job(1, Spec(("sh", "-c", f"echo x >>{lines}; sleep 0.3"), folder=str(tmp_path)), attempt=1, slots=(0,))
    one, other = Processes(tmp_path / "jobs"), Processes(tmp_path / "jobs")
    one.start(job)
    other.start(job)
    wait_for(lambda: one.look(job) == 0 and other.look(job) == 0)
    assert lines.read_text() == "x\n"


def test_what_a_command_leaves_running_is_ended_with_it(tmp_path: Path) -> None:
    job = Job(1, Spec(("sh", "-c", "setsid sleep 300 & exit 0"), folder=str(tmp_path)), attempt=1, slots=(0,))
    runner = Processes(tmp_path / "jobs")
    runner.start(job)
    wait_for(lambda: runner.look(job) == 0)
    assert list(marked(runner.attempt(job))) == []


def test_a_killed_keeper_takes_its_command_along_and_the_attempt_is_lost(tmp_path: Path) -> None:
    job = Job(1, Spec(("sh", "-c", "setsid sleep 300 & sleep 300"), folder=str(tmp_path)), attempt=1, slots=(0,))
    runner = Processes(tmp_path / "jobs")
    runner.start(job)
    folder = runner.attempt(job)
    wait_for(lambda: len(list(marked(folder))) >= 3)
    os.kill(int((folder / "started").read_text()), signal.SIGKILL)
    wait_for(lambda: runner.look(job) == "lost")
    wait_for(lambda: not list(marked(folder)))


def test_a_command_that_saves_when_asked_is_preempted_and_finishes_later(tmp_path: Path) -> None:
    """A script that counts to 40 and keeps its count: what a run does with its checkpoints."""
    count, code = tmp_path / "count", tmp_path / "count.py"
    code.write_text(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        f"path = pathlib.Path({str(count)!r})\n"
        "for n in range(int(path.read_text()) if path.exists() else 0, 40):\n"
        "    time.sleep(0.02)\n"
        "    path.write_text(str(n + 1))\n"
    )
    queue, runner = Queue(tmp_path / "queue"), Processes(tmp_path / "jobs")
    queue.add(Spec((sys.executable, "-I", str(code)), is_resumable=True, folder=str(tmp_path)))
    asked: dict[tuple[int, int], float] = {}
    while not count.exists():
        queue.step(runner, 1, {}, asked)
    queue.add(Spec(("true",), priority=1, folder=str(tmp_path)))
    queue.run(runner, 1, is_drain=True, tick_s=0.02)
    starts = [e["id"] for e in Journal(queue.folder / "journal.jsonl").read() if e["event"] == "start"]
    assert count.read_text() == "40" and starts == [1, 2, 1]
