"""Leases that are held: who has which rows until when."""

from __future__ import annotations

from tidemill.dock.ledger.records import HeldLease

EPOCH_SHIFT = 40  # lease ids are epoch << 40 | serial: one from before a restart is never mistaken for a new one


class Leases:
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._serial = 0
        self._held: dict[int, HeldLease] = {}
        self._no_expiry_before = float("inf")  # spares most calls the look at every lease

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __getitem__(self, key: int) -> HeldLease:
        return self._held[key]

    def add(self, lease: HeldLease) -> int:
        self._serial += 1
        key = self.epoch << EPOCH_SHIFT | self._serial
        self._held[key] = lease
        self._no_expiry_before = min(self._no_expiry_before, lease.deadline)
        return key

    def pop(self, key: int) -> HeldLease:
        return self._held.pop(key)

    def overdue(self, now: float) -> list[int]:
        if now < self._no_expiry_before:
            return []
        late = [key for key, lease in self._held.items() if lease.deadline <= now]
        in_time = (lease.deadline for lease in self._held.values() if lease.deadline > now)
        self._no_expiry_before = min(in_time, default=float("inf"))
        return late

    def of(self, owner: bytes) -> list[int]:
        return [key for key, lease in self._held.items() if lease.owner == owner]

    def at(self, stage: int) -> list[tuple[int, HeldLease]]:
        return [(key, lease) for key, lease in self._held.items() if lease.stage == stage]

    def next_deadline(self) -> float | None:
        return min((lease.deadline for lease in self._held.values()), default=None)

    def span(self) -> tuple[int, int]:
        """Serial numbers of the oldest lease held (or the next one to come) and of the last one given."""
        oldest = min(self._held) & ((1 << EPOCH_SHIFT) - 1) if self._held else self._serial + 1
        return oldest, self._serial
