"""What moved in a step and what waited: bytes through the dock and to rollout, and how long rows lay ready before a
worker took them."""

from __future__ import annotations

import time
from collections.abc import Callable

from tidemill.dock import DockState


class Traffic:
    """`look` is called whenever the driver has looked at the dock; `step` gives what came together since the last."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._looked = self.now()
        self._ready: dict[str, int] = {}  # rows, at the last look
        self._waited: dict[str, float] = {}  # row-seconds of rows that were ready
        self._before: dict[str, float] = {}  # counts of the dock that only grow, at the last step

    def look(self, state: DockState) -> None:
        now = self.now()
        for stage, rows in self._ready.items():
            self._waited[stage] = self._waited.get(stage, 0.0) + rows * (now - self._looked)
        self._looked, self._ready = now, {stage: counts.ready for stage, counts in state.stages.items()}

    def step(self, state: DockState, rows: int, weight_bytes: int) -> dict[str, float]:
        """`rows`: of a step, so that waits are those of a row; `weight_bytes`: brought to rollout so far."""
        self.look(state)
        waited, self._waited = self._waited, {}
        found = {f"machine/queue_s/{stage}": spent / max(1, rows) for stage, spent in waited.items()}
        counts = {
            "machine/dock_bytes": float(state.written),
            "machine/dock_bytes_pulled": float(sum(f.get("pulled_bytes", 0) for f in state.warehouses.values())),
            "machine/weight_bytes": float(weight_bytes),
        }
        return found | self._grown(counts)

    def lost(self, state: DockState) -> dict[str, float]:
        """Count samples that the dock refused for their age, and leases that expired, since the last call."""
        return self._grown({"stale_samples": float(state.stale), "expired_leases": float(state.expired)})

    def _grown(self, counts: dict[str, float]) -> dict[str, float]:
        grown = {name: max(0.0, value - self._before.get(name, 0.0)) for name, value in counts.items()}
        self._before |= counts  # another dock begins at 0 again
        return grown
