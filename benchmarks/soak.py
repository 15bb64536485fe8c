"""A whole run of thousands of steps: no process's memory, descriptors or threads may grow, nor shared or device memory.

A small model trains as any run does, with evaluations, checkpoints, samples and a timeline. Every few steps the kernel
is asked what each process of the run holds. What counts is the mean of the last tenth against that of the second.

    tidemill bench soak                                                   # processes, 5,000 steps
    tidemill bench soak --executor local --device cuda --steps 2000 --limit_s 150
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from benchmarks.faults import RECIPE

ABOUT = "memory, descriptors, threads and shared memory of every process of a run over thousands of steps"
OPTIONS: dict[str, Any] = {
    "steps": 5000,
    "executor": "processes",  # local, processes or ray
    "device": "cpu",
    "schedule": "sync",
    "learners": 1,
    "rollouts": 1,
    "memory_mb": 8,  # of the warehouse: so little that every segment has been used, and used again, by the second tenth
    "every": 10,  # steps between looks
    "rests": 10,  # evaluations and checkpoints in the course of the run
    "limit_s": 0.0,  # end the run then, with the steps made so far; 0: no limit
    "prompts": 8,  # of a step
    "samples": 8,  # of a prompt
    "keep": "",  # a file for every look, as JSON lines
}
GROWTH = 0.02
SHARED, TOUCHED = Path("/dev/shm"), "touched_mb"


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    from tidemill.run import start as launch

    steps = int(options["steps"])
    rest = max(1, steps // max(1, int(options["rests"])))
    cluster = {"executor": options["executor"]}
    if options["executor"] != "local":
        cluster |= {"learners": int(options["learners"]), "rollouts": int(options["rollouts"]), "rewards": 1}
        cluster["memory_mb"] = int(options["memory_mb"])
    with tempfile.TemporaryDirectory(prefix="tm-soak-") as folder:
        recipe = {
            **RECIPE,
            "folder": folder,
            "device": options["device"],
            "train": {
                "steps": steps,
                "prompts_per_step": int(options["prompts"]),
                "samples_per_prompt": int(options["samples"]),
            },
            "rewards": {"functions": [{"function": "benchmarks.soak:balanced"}], "correct_above": 0.8},
            "eval": {"size": 32, "every": rest},
            "checkpoint": {"every": rest, "keep": 2},
            "flow": {"schedule": options["schedule"]},
            "observe": {"progress": "off"},
            "cluster": cluster,
        }
        watch = watching(options)
        began = time.monotonic()
        summary = launch.train(recipe, watch=watch)
        seconds = time.monotonic() - began
    return {"steps": summary.steps, "seconds": seconds, **judged(watch.looks), "lost": watch.lost}


class Looks:
    """What was seen, in so few bytes that looking does not show in what is seen: eight for each number."""

    def __init__(self) -> None:
        self.count = 0
        self.series: dict[str, array[float]] = {}  # a value for each look, no number where there was none

    def add(self, look: Mapping[str, float]) -> None:
        for name in look.keys() - self.series.keys():
            self.series[sys.intern(name)] = array("d", [math.nan] * self.count)
        for name, values in self.series.items():
            values.append(look.get(name, math.nan))
        self.count += 1

    def mean(self, name: str, first: int, end: int) -> float:
        return statistics.fmean([value for value in self.series[name][first:end] if not math.isnan(value)] or [0.0])


def balanced(sample: Any) -> float:
    """A reward that never settles on one length: it goes on drawing responses of all sizes."""
    return 1.0 - abs(sum(c in "0123456789" for c in sample.response) / max(1, len(sample.response)) - 0.5)


def watching(options: Mapping[str, Any]) -> Any:
    from tidemill.device import pick
    from tidemill.run.watcher import Watcher

    device = None if options["device"] == "cpu" else pick(options["device"])

    class Watch(Watcher):
        def __init__(self) -> None:
            self.looks = Looks()
            self.ends_at = time.monotonic() + float(options["limit_s"] or float("inf"))
            self.lost = 0
            self.before = descendants(os.getpid()).keys() - {os.getpid()}
            self.shared: set[Path] = set()

        def started(self, workers: Any, first_step: int) -> None:
            self.workers = workers

        def stepped(self, step: int, metrics: dict[str, float]) -> None:
            if step % int(options["every"]):
                return
            here = named(self.workers, self.before)
            self.shared |= shared_by(here.keys())
            look = {"step": float(step), "shm_mb": sum(map(held_by, self.shared)) / 1e6}
            for pid, name in here.items():
                with contextlib.suppress(OSError):
                    look |= {f"{name} {quantity}": value for quantity, value in held(pid).items()}
            if device is not None:
                import torch

                memory = device.memory()
                look["device_used_mb"] = (memory.total - memory.free) / 1e6
                look["device_reserved_mb"] = memory.reserved / 1e6
                look["device_allocated_mb"] = torch.accelerator.memory_allocated() / 1e6
            self.looks.add(look)
            pool = getattr(self.workers, "pool", None)
            self.lost = pool.lost_total if pool is not None else 0
            if options["keep"]:
                with Path(options["keep"]).open("a") as out:
                    out.write(json.dumps(look) + "\n")

        def stopping(self) -> bool:
            return time.monotonic() > self.ends_at

    return Watch()


def judged(looks: Looks) -> dict[str, Any]:
    """Per quantity the means of the first, the second and the last tenth of the looks, and by how much the last is more
    than the second. What of shared memory a process has touched is told, not judged: all of it together is `shm_mb`."""
    tenth = max(1, looks.count // 10)
    table: dict[str, dict[str, float]] = {}
    for name in sorted(looks.series.keys() - {"step"}):
        first, second = looks.mean(name, 0, tenth), looks.mean(name, tenth, 2 * tenth)
        last = looks.mean(name, looks.count - tenth, looks.count)
        growth = last / second - 1 if second else last
        table[name] = {"first_tenth": first, "second_tenth": second, "last_tenth": last, "growth": growth}
    grown = [name for name, row in table.items() if row["growth"] > GROWTH and not name.endswith(TOUCHED)]
    return {"is_flat": not grown, "grown": grown, "table": table, "looks": looks.count}


# What the kernel knows


def held(pid: int) -> dict[str, float]:
    status = Path(f"/proc/{pid}/status").read_text()
    found = {name: float(value) for name, value in re.findall(r"^(\w+):\s+(\d+)", status, re.MULTILINE)}
    own = found.get("VmRSS", 0.0) - found.get("RssShmem", 0.0)
    return {
        "own_mb": own / 1e3,  # resident, without shared memory
        "anonymous_mb": found.get("RssAnon", 0.0) / 1e3,  # of it, what is no file
        TOUCHED: found.get("RssShmem", 0.0) / 1e3,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": found.get("Threads", 0.0),
    }


def shared_by(pids: Collection[int]) -> set[Path]:
    """Entries of the folder of shared memory that these processes have open or mapped."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found |= set(re.findall(rf" {SHARED}/([^/\n]+)", Path(f"/proc/{pid}/maps").read_text()))
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    found |= set(re.findall(rf"^{SHARED}/([^/]+)", os.readlink(file)))
    return {SHARED / name for name in found if not name.endswith(" (deleted)")}


def held_by(entry: Path) -> int:
    """Bytes of a file, or of all files in a folder; 0 once it is gone."""
    size = 0
    for path in (entry, *entry.rglob("*")):
        with contextlib.suppress(OSError):
            size += path.stat().st_blocks * 512
    return size


def named(workers: Any, before: Collection[int]) -> dict[int, str]:
    """This process, and every one that comes from it: workers by their names, the rest by what it runs."""
    known = {member.pid: name for name, member in workers.pool.members.items()} if hasattr(workers, "pool") else {}
    found: dict[int, str] = {}
    for pid, command in descendants(os.getpid()).items():
        if pid in before:
            continue
        name = "driver" if pid == os.getpid() else known.get(pid) or command
        found[pid] = name if name not in found.values() else f"{name} {pid}"
    return found


def descendants(root: int) -> dict[int, str]:
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found, news = [root], [root]
    while news:
        parent = news.pop()
        children = [pid for pid, its in parents.items() if its == parent]
        found += children
        news += children
    return {pid: command(pid) for pid in found}


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        for name in ("ledger", "warehouse", "forkserver", "resource_tracker", "raylet", "gcs_server"):
            if any(name in word for word in words):
                return name
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return str(pid)
