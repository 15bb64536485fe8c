"""Tally: what the workers of one step counted, as metrics. Means are weighted by how often they were given.

Workers may count from threads of their own.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tidemill.observe.profile import span

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
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._sums: dict[str, float] = {}
        self._means: dict[str, list[float]] = {}
        self._updates: list[dict[str, float]] = []
        self._started = time.perf_counter()

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
        started = time.perf_counter()
        try:
            with span(name):
                yield
        finally:
            self.add(f"time/{name}", time.perf_counter() - started)

    def take(self) -> dict[str, float]:
        """The step's metrics; counting starts anew."""
        with self._lock:
            merged = dict(self._sums)
            # fsum rounds once: the order in which workers counted does not show.
            merged.update({n: math.fsum(values) / len(values) for n, values in self._means.items()})
            for name in dict.fromkeys(n for u in self._updates for n in u):
                values = [u[name] for u in self._updates if name in u]
                reduce = max if name.endswith("_max") else min if name.endswith("_min") else None
                merged[name] = reduce(values) if reduce else sum(values) / len(values)
            merged["time/step"] = time.perf_counter() - self._started
            self._clear()
            return merged
