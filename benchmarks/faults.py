"""A run whose workers are killed every few seconds: it must end with the right number of steps, every sample used once.

A small model trains on workers of its own while a second thread kills, at random and with SIGKILL, a rollout worker, a
reward worker, the ledger, a warehouse or a learner rank; or it stops one without ending it. The same run, undisturbed,
says what the weights should come to.

    tidemill bench faults --minutes 10 --json
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ABOUT = "kill workers of every kind at random while a run goes on: steps, samples lost or doubled, the same accuracy"
OPTIONS: dict[str, Any] = {
    "minutes": 1.0,
    "executor": "processes",  # or ray
    "every_s": 4.0,  # between kills, about
    "seed": 0,
    "learners": 2,
    "rollouts": 2,
    "rewards": 1,
    "tp": 1,  # ranks of each rollout engine
    "each": False,  # how long each kind takes to recover from, instead of the soak
}
KINDS = ("rollout", "reward", "ledger", "warehouse", "learner", "hang")
RECIPE: dict[str, Any] = {
    "name": "soak",
    "device": "cpu",
    "threads": 1,
    "model": {"tiny": {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 48, "window": 64}},
    "data": {"source": "chain", "args": {"terms": 2, "max_total": 9}, "max_prompt_tokens": 16},
    "rollout": {"max_new_tokens": 8},
    "rewards": {"functions": [{"function": "benchmarks.faults:digits"}], "correct_above": 0.8},
    "train": {"prompts_per_step": 8, "samples_per_prompt": 8},
    "learn": {"lr": 3e-3},
    "eval": {"size": 100},
    "checkpoint": {"every": 5},
    "observe": {"tensorboard": False, "progress": "off", "samples_per_step": 0},
}
DIGITS = frozenset("0123456789")
FIRST_STEPS = 20  # of a short run that tells how many steps fill the time


def digits(sample: Any) -> float:
    """A task that a new model learns in some thirty steps: say digits."""
    return sum(c in DIGITS for c in sample.response) / max(1, len(sample.response))


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    if options["each"]:
        return recoveries(options)
    seconds = 60 * float(options["minutes"])
    with tempfile.TemporaryDirectory(prefix="tm-faults-") as folder:
        pace = train(Path(folder) / "pace", FIRST_STEPS, options, None)["seconds_per_step"]
        # Kills cost time: the undisturbed pace would fill a fraction of it.
        steps = max(FIRST_STEPS, int(0.6 * seconds / max(pace, 1e-3)))
        calm = train(Path(folder) / "calm", steps, {**options, "executor": "local"}, None)
        killer = Killer(random.Random(int(options["seed"])), float(options["every_s"]))
        wild = train(Path(folder) / "wild", steps, options, killer)
    used = steps * RECIPE["train"]["prompts_per_step"] * RECIPE["train"]["samples_per_prompt"]
    return {
        "steps_asked": steps,
        "steps": wild["steps"],
        "kills": dict(killer.kills),
        "kills_total": sum(killer.kills.values()),
        "seconds": wild["seconds"],
        "lost": max(0, used - wild["learned"]),
        "doubled": max(0, wild["learned"] - used),
        "largest_difference": difference(calm["lines"], wild["lines"]),
        "accuracy_undisturbed": calm["accuracy"],
        "accuracy": wild["accuracy"],
        "workers_lost": wild["workers_lost"],
        "stalls": wild["stalls"],
        "seconds_per_step_undisturbed": pace,
    }


def train(
    folder: Path, steps: int, options: Mapping[str, Any], killer: Killer | None, watch: Any = None
) -> dict[str, Any]:
    """One run; what it came to."""
    from tidemill.run import start as launch
    from tidemill.run.loop import Watcher

    seen: dict[str, Any] = {"workers": None}

    class Watch(Watcher):
        def started(self, workers: Any, first_step: int) -> None:
            seen["workers"] = workers
            if killer is not None and killer.workers is None:
                killer.begin(workers)

        def stepped(self, step: int, metrics: dict[str, float]) -> None:
            if killer is not None:
                killer.step = step

        def noted(self, message: str) -> None:
            if options.get("verbose"):
                print(f"{time.strftime('%H:%M:%S')} {message[:200]}", flush=True)

    cluster = {
        "executor": options["executor"],
        "learners": int(options["learners"]),
        "rollouts": int(options["rollouts"]),
        "rewards": int(options["rewards"]),
        "lease_s": 2.0,
        "stall_s": 20.0,
        "collective_s": 30.0,
        "memory_mb": 256,
    }
    train_part = {**RECIPE["train"], "steps": steps}
    rollout = {**RECIPE["rollout"], "tp": 1 if options["executor"] == "local" else int(options["tp"])}
    recipe = {**RECIPE, "folder": str(folder), "train": train_part, "rollout": rollout, "cluster": cluster}
    began = time.monotonic()
    summary = launch.train(recipe, watch=watch or Watch())
    if killer is not None:
        killer.end()
    lines = [json.loads(line) for line in (folder / "soak" / "metrics.jsonl").read_text().splitlines()]
    learned = [line for line in lines if "learned_tokens" in line]
    workers = seen["workers"]
    return {
        "steps": summary.steps,
        "seconds": time.monotonic() - began,
        "seconds_per_step": summary.seconds / max(1, summary.steps),
        "accuracy": summary.accuracy_after,
        "learned": sum(int(line.get("learned_samples", 0)) for line in learned),
        "lines": learned,
        "workers_lost": getattr(getattr(workers, "pool", None), "lost_total", 0),
        "stalls": getattr(workers, "stalls", 0),
    }


def difference(calm: list[dict[str, Any]], wild: list[dict[str, Any]]) -> float:
    """The largest difference of any step's loss: every sample once, with the right weights, or it would show."""
    return max((abs(a["loss"] - b["loss"]) for a, b in zip(calm, wild, strict=True)), default=0.0)


class Killer:
    """Ends processes for as long as a run goes on."""

    def __init__(self, rng: random.Random, every_s: float) -> None:
        self.rng, self.every_s = rng, every_s
        self.kills: Counter[str] = Counter()
        self.step = 0
        self.workers: Any = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def begin(self, workers: Any) -> None:
        self.workers = workers
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        self._thread.join(10)

    def _work(self) -> None:
        while not self._stop.wait(self.every_s * self.rng.uniform(0.5, 1.5)):
            kind = self.rng.choice(KINDS)
            pid = self._victim(kind)
            if pid:
                try:
                    os.kill(pid, signal.SIGSTOP if kind == "hang" else signal.SIGKILL)
                except ProcessLookupError:
                    continue
                self.kills[kind] += 1

    def _victim(self, kind: str) -> int:
        from tidemill.errors import DockError

        if kind in ("ledger", "warehouse"):
            server = self.workers.run_dock.server
            keeper = server.ledger if kind == "ledger" else next(iter(server.warehouses.values()))
            try:
                return int(keeper.pid)
            except DockError:  # between two docks
                return 0
        role = self.rng.choice(("rollout", "learner")) if kind == "hang" else kind
        found = [m.pid for m in list(self.workers.pool.members.values()) if m.post.group.name == role and m.pid]
        ready = [m.pid for m in list(self.workers.pool.members.values()) if m.pid in found and m.state == "ready"]
        return self.rng.choice(ready) if ready else 0


# -- how long each kind takes ------------------------------------------------------------------------------------------


def recoveries(options: Mapping[str, Any]) -> dict[str, float]:
    """Seconds from each kind of kill to the end of the next step, less what a step takes undisturbed."""
    from tidemill.run.loop import Watcher

    found: dict[str, float] = {}

    class OneByOne(Watcher):
        """Lets some steps pass, kills the next kind in the middle of a step, and waits for the step to end."""

        def __init__(self) -> None:
            self.left = [k for k in KINDS if k != "hang"]
            self.killer = Killer(random.Random(0), 1.0)
            self.under_way: tuple[str, float] | None = None
            self.last, self.usual = time.monotonic(), 0.0

        def started(self, workers: Any, first_step: int) -> None:
            self.killer.workers = workers

        def stepped(self, step: int, metrics: dict[str, float]) -> None:
            now = time.monotonic()
            if self.under_way is not None:
                kind, at = self.under_way
                found[kind] = max(0.0, now - at - self.usual)
                self.under_way = None
            elif step > 3:
                self.usual = now - self.last
                if self.left and step % 4 == 0:
                    self._kill(self.left.pop(0))
            self.last = time.monotonic()

        def _kill(self, kind: str) -> None:
            pid = self.killer._victim(kind)
            self.under_way = kind, time.monotonic()
            os.kill(pid, signal.SIGKILL)

    with tempfile.TemporaryDirectory(prefix="tm-faults-") as folder:
        train(Path(folder), 4 * (len(KINDS) + 1), options, None, OneByOne())
    return {f"recovery_{kind}_s": seconds for kind, seconds in found.items()}
