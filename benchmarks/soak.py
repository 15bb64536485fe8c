"""A whole run of thousands of steps: no process's memory, descriptors or threads may grow, nor shared or device memory.

A small model trains as any run does, with evaluations, checkpoints, samples and a timeline. Every few steps the kernel
is asked what each process of the run holds. What counts is the mean of the last tenth against that of the second.

    tidemill bench soak                                                   # processes, 5,000 steps
    tidemill bench soak --executor local --device cuda --steps 2000 --limit_s 150
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import tempfile
import time
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
        cluster["memory_mb"] = 64
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


def balanced(sample: Any) -> float:
    """A reward that never settles on one length: it goes on drawing responses of all sizes."""
    return 1.0 - abs(sum(c in "0123456789" for c in sample.response) / max(1, len(sample.response)) - 0.5)


def watching(options: Mapping[str, Any]) -> Any:
    from tidemill.device import pick
    from tidemill.run.watcher import Watcher

    device = None if options["device"] == "cpu" else pick(options["device"])

    class Watch(Watcher):
        def __init__(self) -> None:
            self.looks: list[dict[str, float]] = []
            self.ends_at = time.monotonic() + float(options["limit_s"] or float("inf"))
            self.lost = 0
            self.before = descendants(os.getpid()).keys() - {os.getpid()}
            self.shared_before = set(SHARED.iterdir())

        def started(self, workers: Any, first_step: int) -> None:
            self.workers = workers

        def stepped(self, step: int, metrics: dict[str, float]) -> None:
            if step % int(options["every"]):
                return
            here = named(self.workers, self.before)
            look = {"step": float(step), "shm_mb": shared_bytes(self.shared_before, here.keys()) / 1e6}
            for pid, name in here.items():
                with contextlib.suppress(OSError):
                    look |= {f"{name} {quantity}": value for quantity, value in held(pid).items()}
            if device is not None:
                import torch

                memory = device.memory()
                look["device_used_mb"] = (memory.total - memory.free) / 1e6
                look["device_reserved_mb"] = memory.reserved / 1e6
                look["device_allocated_mb"] = torch.accelerator.memory_allocated() / 1e6
            self.looks.append(look)
            pool = getattr(self.workers, "pool", None)
            self.lost = pool.lost_total if pool is not None else 0
            if options["keep"]:
                with Path(options["keep"]).open("a") as out:
                    out.write(json.dumps(look) + "\n")

        def stopping(self) -> bool:
            return time.monotonic() > self.ends_at

    return Watch()


def judged(looks: list[dict[str, float]]) -> dict[str, Any]:
    """Per quantity the mean of the second and of the last tenth of the looks, and by how much the last is more. What of
    shared memory a process has touched is told, not judged: all of it together is `shm_mb`."""
    tenth = max(1, len(looks) // 10)
    table: dict[str, dict[str, float]] = {}
    for key in looks[-1].keys() - {"step"}:
        before, after = mean(looks[tenth : 2 * tenth], key), mean(looks[-tenth:], key)
        table[key] = {"second_tenth": before, "last_tenth": after, "growth": after / before - 1 if before else after}
    table = dict(sorted(table.items()))
    grown = [key for key, row in table.items() if row["growth"] > GROWTH and not key.endswith(TOUCHED)]
    return {"is_flat": not grown, "grown": grown, "table": table, "looks": len(looks)}


def mean(looks: list[dict[str, float]], key: str) -> float:
    return statistics.fmean([look[key] for look in looks if key in look] or [0.0])


# What the kernel knows


def held(pid: int) -> dict[str, float]:
    status = Path(f"/proc/{pid}/status").read_text()
    found = {name: float(value) for name, value in re.findall(r"^(\w+):\s+(\d+)", status, re.MULTILINE)}
    own = found.get("VmRSS", 0.0) - found.get("RssShmem", 0.0)
    return {
        "own_mb": own / 1e3,  # resident, without shared memory
        TOUCHED: found.get("RssShmem", 0.0) / 1e3,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": found.get("Threads", 0.0),
    }


def shared_bytes(before: set[Path], own: Collection[int]) -> int:
    """Bytes of what is new in shared memory since the run began, but for what processes of others have open."""
    new = {path for path in SHARED.iterdir() if path not in before}
    for pid in [int(folder.name) for folder in Path("/proc").glob("[0-9]*")] if new else []:
        if pid not in own:
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text()
                new -= {path for path in new if f"{path}" in maps}
    found = 0
    for path in [inner for entry in new for inner in (entry, *entry.rglob("*"))]:
        with contextlib.suppress(OSError):
            found += path.stat().st_blocks * 512
    return found


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
