"""Tally: what workers counted in one step, as metrics. Means are weighted by their number of values. Counts of samples
come with their commits and are reported by the dock; here are counts of workers' own work: times, updates, what was
learned. Any thread may count."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tidemill.device.peaks import Peak, Peaks
from tidemill.dock import Tallied
from tidemill.flow.workers import MachineReport
from tidemill.observe.profile import span
from tidemill.observe.timeline import Recorder


@dataclass(frozen=True, slots=True)
class Counted:
    """What one process counted, in a form that can be added."""

    sums: dict[str, float]
    means: dict[str, tuple[float, int]]  # sum and count
    updates: list[dict[str, float]]
    peaks: dict[str, Peak] = field(default_factory=dict)  # of memory, by what was done
    machine: MachineReport | None = None  # of a process that does nothing else

    @staticmethod
    def of_samples(told: Tallied) -> Counted:
        """Convert the dock's counts."""
        return Counted(told.sums, told.means, [])


LATEST = (
    "_max",
    "skipped_updates",
)  # a step keeps the largest: extremes, and counts since the run began


def together(parts: Sequence[Counted]) -> dict[str, float]:
    """Combine the counts of all processes into a step's metrics."""
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
    return merged | memory([part.peaks for part in parts])


def memory(parts: Sequence[Mapping[str, Peak]]) -> dict[str, float]:
    """The most memory of a process while a role was at work, over all processes."""
    found: dict[str, Peak] = {}
    for role, peak in ((role_of(name), peak) for part in parts for name, peak in part.items()):
        found[role] = found.get(role, peak).or_more(peak)
    on_host = {f"machine/host_memory_peak/{role}": float(peak.host) for role, peak in found.items() if peak.host}
    return on_host | {
        f"machine/device_memory_peak/{role}": float(peak.device) for role, peak in found.items() if peak.device
    }


ROLES = {
    "rollout": ("rollout",),
    "reward": ("reward", "advantage"),
    "reference": ("reference", "teacher"),
    "actor": ("learn", "old_logprobs", "publish"),
    "critic": ("learn_values", "values"),
}


def role_of(stage: str) -> str:
    return next((role for role, stages in ROLES.items() if stage in stages), stage)


def idle(measured: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Compute the share of a step in which each role had nothing to do. Roles that share a thread wait for one
    another."""
    busy = {role: sum(measured.get(f"time/{name}", 0.0) for name in names) for role, names in ROLES.items()}
    return {f"idle/{role}": max(0.0, 1.0 - spent / seconds) for role, spent in busy.items() if spent > 0}


class Tally:
    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        recorder: Recorder | None = None,
        peaks: Peaks | None = None,
    ) -> None:
        """`recorder`, `peaks`: what else is kept of work that is timed."""
        self.now, self.recorder, self.peaks = now, recorder, peaks
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
        """Add the metrics of one optimizer update; a step's are their mean, or extreme where the name says so."""
        with self._lock:
            self._updates.append(dict(metrics))

    @contextmanager
    def time(self, name: str, **work: float) -> Iterator[None]:
        """Count the seconds inside as a stage's. `work`: amounts for the timeline, such as tokens."""
        if self.peaks is not None:
            self.peaks.begin(name)
        started = self.now()
        try:
            with span(name):
                yield
        finally:
            self.took(name, started, **work)
            if self.peaks is not None:
                self.peaks.end(name)

    def took(self, name: str, started: float, **work: float) -> None:
        """Count the seconds since `started` as a stage's."""
        ended = self.now()
        self.add(f"time/{name}", ended - started)
        if self.recorder is not None:
            self.recorder.span(name, started, ended, **work)

    @contextmanager
    def shown(self, name: str, **work: float) -> Iterator[None]:
        """Put the seconds inside on the timeline alone."""
        started = self.now()
        try:
            yield
        finally:
            if self.recorder is not None:
                self.recorder.span(name, started, self.now(), **work)

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()

    def drain(self) -> Counted:
        """Return all counts and reset them."""
        with self._lock:
            # fsum rounds once: the order in which workers counted does not show.
            means = {name: (math.fsum(values), len(values)) for name, values in self._means.items()}
            peaks = self.peaks.drain() if self.peaks is not None else {}
            counted = Counted(self._sums, means, self._updates, peaks)
            self._clear()
            return counted
