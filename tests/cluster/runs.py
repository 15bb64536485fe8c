"""Small runs on workers of their own, and a watcher that kills some of them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_resume import RECIPE, numbers
from tidemill.cluster.driver.driver import Driver
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
