"""Tally: what the workers of one step counted, as metrics. Means are weighted by how often they were given.

What is counted of samples comes with their commits and is the dock's to tell; here is what workers count of their own
work: times, updates, what was learned. They may do so from threads of their own.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tidemill.dock import Tallied
from tidemill.observe.profile import span


@dataclass(frozen=True, slots=True)
class Counted:
    """What one process counted, in a form that adds up."""

    sums: dict[str, float]
    means: dict[str, tuple[float, int]]  # sum and count
    updates: list[dict[str, float]]

    @staticmethod
    def of_samples(told: Tallied) -> Counted:
        """What the dock has to tell."""
        return Counted(told.sums, told.means, [])


LATEST = ("_max", "skipped_updates")  # the largest of a step's: an extreme, and what counts from the run's beginning


def together(parts: Sequence[Counted]) -> dict[str, float]:
    """The metrics of a step, from all processes that counted."""
    merged: dict[str, float] = {}
    for part in parts:
        for name, value in part.sums.items():
            merged[name] = merged.get(name, 0.0) + value
    for name in dict.fromkeys(n for part in parts for n in part.means):
        pairs = [part.means[name] for part in parts if name in part.means]
        merged[name] = math.fsum(s for s, _ in pairs) / sum(n for _, n in pairs)
    updates = [update for part in parts for update in part.updates]
    for name in dict.fromkeys(n for u in updates for n in u):
        values = [u[name] for u in updates if name in u]
        reduce = max if name.endswith(LATEST) else min if name.endswith("_min") else None
        merged[name] = reduce(values) if reduce else sum(values) / len(values)
    return merged


ROLES = {
    "rollout": ("rollout",),
    "reward": ("reward", "advantage"),
    "reference": ("reference", "teacher"),
    "actor": ("learn", "old_logprobs", "publish"),
    "critic": ("learn_values", "values"),
}


def idle(measured: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Share of a step in which each role had nothing to do. Roles that share a thread wait for one another."""
    busy = {role: sum(measured.get(f"time/{name}", 0.0) for name in names) for role, names in ROLES.items()}
    return {f"idle/{role}": max(0.0, 1.0 - spent / seconds) for role, spent in busy.items() if spent > 0}


class Tally:
    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._sums: dict[str, float] = {}
        self._means: dict[str, list[float]] = {}
        self._updates: list[dict[str, float]] = []

    def add(self, name: str, value: float) -> None:
        with self._lock:
            self._sums[name] = self._sums.get(name, 0.0) + value

    def mean(self, name: str, value: float) -> None:
        with self._lock:
            self._means.setdefault(name, []).append(value)

    def update(self, metrics: Mapping[str, float]) -> None:
        """Metrics of one optimizer update; a step's are their mean, or extreme where the name says so."""
        with self._lock:
            self._updates.append(dict(metrics))

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        started = self.now()
        try:
            with span(name):
                yield
        finally:
            self.add(f"time/{name}", self.now() - started)

    def close(self) -> None:
        """Nothing is held."""

    def drain(self) -> Counted:
        """All that was counted; counting starts anew."""
        with self._lock:
            # fsum rounds once: the order in which workers counted does not show.
            means = {name: (math.fsum(values), len(values)) for name, values in self._means.items()}
            counted = Counted(self._sums, means, self._updates)
            self._clear()
            return counted
