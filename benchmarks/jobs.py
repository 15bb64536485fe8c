"""The queue under fire: jobs with priorities while the queue itself is killed, again and again.

tidemill bench jobs --json

Each job is a shell command that writes a line when it begins and one when it ends. The queue runs as a process of its
own and is killed with SIGKILL at random moments until all jobs are done. Counted: jobs that ran exactly once to their
end, jobs that started while one of a higher priority was waiting, and processes that were left.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidemill.jobs import state
from tidemill.jobs.journal import Journal
from tidemill.jobs.queue import Queue
from tidemill.jobs.state import Spec

ABOUT = "the queue of jobs: 50 with priorities, while the queue itself is killed"
OPTIONS: dict[str, Any] = {"jobs": 50, "slots": 2, "kills": 10, "seed": 0, "every_s": 1.0}
RUN = """
import sys
from pathlib import Path
from tidemill.jobs.queue import Queue
from tidemill.jobs.runner import Processes
queue = Queue(Path(sys.argv[1]))
queue.run(Processes(queue.folder / "jobs"), int(sys.argv[2]), is_drain=True, tick_s=0.02)
"""


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    rng = random.Random(options["seed"])
    with tempfile.TemporaryDirectory(prefix="tidemill-jobs-") as name:
        folder = Path(name)
        queue = Queue(folder / "queue")
        fill(queue, folder / "lines", options["jobs"], rng)
        started = time.perf_counter()
        kills = drain(queue, options, rng)
        seconds = time.perf_counter() - started
        events = Journal(queue.folder / "journal.jsonl").read()
        phases = Counter(job.phase for job in Queue(queue.folder).jobs.values())
        lines = Counter((folder / "lines").read_text().split("\n")[:-1])
        left = processes_of(queue.folder)
    once = sum(lines[f"begin {n}"] == lines[f"end {n}"] == 1 for n in range(1, options["jobs"] + 1))
    return {
        "jobs": options["jobs"],
        "done": phases["done"],
        "exactly_once": once,
        "out_of_order": out_of_order(events),
        "left_behind": len(left),
        "queue_kills": kills,
        "seconds": seconds,
        "jobs_per_s": options["jobs"] / seconds,
    }


def fill(queue: Queue, lines: Path, count: int, rng: random.Random) -> None:
    for number in range(1, count + 1):
        text = f"echo begin {number} >>{lines}; sleep {rng.uniform(0, 0.2):.3f}; echo end {number} >>{lines}"
        queue.add(Spec(("sh", "-c", text), str(number), priority=rng.randrange(4)))


def drain(queue: Queue, options: Mapping[str, Any], rng: random.Random) -> int:
    """Start the queue, kill it at random moments, start it again; let it end by itself after the last kill."""
    kills = 0
    while True:
        command = [sys.executable, "-c", RUN, str(queue.folder), str(options["slots"])]
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        if kills >= options["kills"]:
            if process.wait():
                raise RuntimeError("the queue ended with an error: its lines are above")
            return kills
        time.sleep(rng.uniform(0.2, 2.0) * options["every_s"])
        if process.poll() is not None:
            return kills
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1


def out_of_order(events: list[dict[str, Any]]) -> int:
    """Starts at which a job with a higher priority, or an earlier one with the same, was waiting."""
    jobs: state.Jobs = {}
    wrong = 0
    for event in events:
        if event["event"] == "start":
            waiting = state.in_order(job for job in jobs.values() if job.phase == "waiting")
            wrong += waiting[0].id != event["id"]
        state.apply(jobs, event)
    return wrong


def processes_of(folder: Path) -> list[str]:
    """Processes that carry the queue's folder in their command line or environment."""
    mark, found = str(folder).encode(), []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if mark in text:
            found.append(entry.name)
    return found


if __name__ == "__main__":
    print(json.dumps(run(OPTIONS)))
