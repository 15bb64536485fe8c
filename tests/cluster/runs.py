"""Small runs on workers of their own, and a watcher that kills some of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_resume import RECIPE, numbers
from tidemill.cluster.driver.driver import Driver
from tidemill.flow.records import Activity
from tidemill.run import start as launch
from tidemill.run.loop import Summary
from tidemill.run.watcher import Watcher

STEPS = 4
CLUSTER = {"executor": "processes", "lease_s": 1.5, "collective_s": 20.0, "stall_s": 60.0, "memory_mb": 256}


def recipe(folder: Path, **over: Any) -> dict[str, Any]:
    made: dict[str, Any] = {**RECIPE, "folder": str(folder), "cluster": CLUSTER}
    made["train"] = {**RECIPE["train"], "steps": STEPS}
    made["eval"] = {"size": 8}
    for section, values in over.items():
        before = made.get(section, {})
        both = isinstance(before, dict) and isinstance(values, dict)
        made[section] = {**before, **values} if both else values
    return made


def train(folder: Path, watch: Watcher | None = None, **over: Any) -> Summary:
    return launch.train(recipe(folder, **over), watch=watch)


def measured(folder: Path) -> list[dict[str, Any]]:
    """What a run measured, without what tells of its workers and ranks, their memory and its time."""
    own = ("workers_lost", "driver_bytes", "handed_over/", "slowest_", "critic/slowest_")
    return [{k: v for k, v in line.items() if not k.startswith(own)} for line in numbers(folder / "small")]


def assert_same(a: list[dict[str, Any]], b: list[dict[str, Any]], within: float = 1e-5) -> None:
    assert [line["step"] for line in a] == [line["step"] for line in b]
    for x, y in zip(a, b):
        assert x.keys() == y.keys()
        for key, value in x.items():
            assert y[key] == pytest.approx(value, abs=within, rel=within), (x["step"], key)


LEARNED = ("loss", "grad_norm", "version", "entropy", "lr", "learned_tokens", "learned_samples")
COUNTED = ("prompt_tokens", "made_tokens", "response_tokens", "reward", "accuracy", "reward_std", "dropped_samples")


def assert_same_learning(a: list[dict[str, Any]], b: list[dict[str, Any]], within: float = 1e-5) -> None:
    """Whatever happened in between: every sample learned and counted once, in its step; the same updates."""

    def learned(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in m.items() if k in ("step", *LEARNED, *COUNTED)} for m in lines if "loss" in m]

    assert_same(learned(a), learned(b), within)


class Disturb(Watcher):
    """Kills what `victim` names, `after_s` into the step that follows `at_step`."""

    def __init__(self, victim: Callable[[Driver], int], at_step: int = 1, after_s: float = 0.03) -> None:
        self.victim, self.at_step, self.after_s = victim, at_step, after_s
        self.said: list[str] = []
        self.killed: list[int] = []
        self.workers: Driver | None = None

    def started(self, workers: Any, first_step: int) -> None:
        self.workers = workers

    def noted(self, message: str) -> None:
        self.said.append(message)

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        if step == self.at_step and not self.killed:
            assert self.workers is not None
            pid = self.victim(self.workers)
            self.killed.append(pid)
            threading.Timer(self.after_s, os.kill, (pid, signal.SIGKILL)).start()


def worker(name: str) -> Callable[[Driver], int]:
    return lambda workers: workers.pool.members[name].pid


def ledger(workers: Driver) -> int:
    return workers.run_dock.server.ledger.pid


def warehouse(workers: Driver) -> int:
    return next(iter(workers.run_dock.server.warehouses.values())).pid


class StopInEvaluation(Watcher):
    """Presses Ctrl-C at the first sign of the evaluation, and keeps what the run said it was doing."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.counted: list[tuple[int, Activity]] = []
        self.step = 0
        self.asked_at = 0.0

    def beginning(self, step: int) -> None:
        self.step = step

    def doing(self, activity: Activity) -> None:
        self.seen.append(activity.what)
        self.counted.append((self.step, activity))
        if activity.what == "scoring answers" and activity.done and not self.asked_at:
            self.asked_at = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT)


SHORT = {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 2}
SLOW_REWARD = "import time\n\ndef slow(sample):\n    time.sleep(0.2)\n    return 1.0\n"


def stopped_in_evaluation(folder: Path, **over: Any) -> StopInEvaluation:
    """Train two steps, evaluate for 40 s or more, and stop in between: the run must end soon, saved."""
    folder.mkdir(exist_ok=True)
    (folder / "slow.py").write_text(SLOW_REWARD)
    watch = StopInEvaluation()
    late = {"eval": {"size": 200, "before": False}, "data": {"held_out": 200}, "train": SHORT}
    rewards = {"functions": [f"{folder}/slow.py:slow"], "workers": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tidemill.run.interrupt.TELL_EVERY_S", 0.0)  # whatever is short is seen too
        summary = train(folder, watch, **{**late, **over}, rewards=rewards)
    assert watch.asked_at and time.monotonic() - watch.asked_at < 15
    assert summary.steps == 2 and summary.is_stopped and summary.after is None
    assert (folder / "small" / "checkpoints" / "step-000002").is_dir()
    assert all(a.done <= a.total for _, a in watch.counted), watch.counted
    assert {step for step, a in watch.counted if a.what == "rolling out"} == {1, 2}
    return watch


def stopped_while_feeding(folder: Path, **over: Any) -> None:
    """Stop while a worker reads rows for 40 s or more: the run must end soon, without a step."""
    folder.mkdir(exist_ok=True)
    (folder / "slow_task.py").write_text(  # slow in the worker that feeds alone, so that all else is quick
        "import os, time\nfrom tidemill.data.generators import Problem\nfrom tidemill.imports import WORKER\n\n"
        "asked = []\n\ndef slow(rng):\n    asked.append(1)\n"
        "    time.sleep(0.2 if WORKER in os.environ and len(asked) > 100 else 0)\n"
        "    n = rng.randint(0, 10**6)\n    return Problem(f'{n}=', str(n))\n"
    )

    class StopWhileReading(Watcher):
        asked_at = 0.0

        def doing(self, activity: Activity) -> None:
            if activity.what == "reading data" and not self.asked_at:
                self.asked_at = time.monotonic()
                os.kill(os.getpid(), signal.SIGINT)

    watch = StopWhileReading()
    data = {"source": f"{folder}/slow_task.py:slow", "args": {}, "held_out": 2}
    train_ = {"steps": 1, "prompts_per_step": 300}
    summary = train(folder, watch, **over, data=data, train=train_, eval={"size": 0})
    assert summary.is_stopped and summary.steps == 0
    assert watch.asked_at and time.monotonic() - watch.asked_at < 15
