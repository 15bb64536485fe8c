"""Memory for what is read, used again: touching fresh pages costs more than the copy into them. A buffer comes back
when the last tensor that lies in it is gone."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

LEAST_BYTES = 1 << 20  # smaller ones are malloc's own to use again
KEPT_BYTES = 1 << 30  # at most so much is kept for later
STEP_BYTES = 1 << 21  # sizes are rounded up to this: a huge page


class Buffer(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes on loan; deleting the array brings them back."""

    pool: Pool | None = None  # only the loan itself has it: views are of this type, too, and hold it as their base

    def __del__(self) -> None:
        if self.pool is not None and not sys.is_finalizing():
            self.pool._take_back(self.base)


class Pool:
    """Thread-safe; tensors may be collected at any point, so that taking back must not wait for a lock held here."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._lock = threading.RLock()
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = {}
        self.held_bytes = 0  # in the free list

    def lend(self, nbytes: int) -> npt.NDArray[np.uint8]:
        if nbytes < LEAST_BYTES:
            return np.empty(nbytes, np.uint8)
        size = -(-nbytes // STEP_BYTES) * STEP_BYTES
        with self._lock:
            free = self._free.get(size)
            raw = free.pop() if free else None
            if raw is not None:
                self.held_bytes -= size
                rest = self._free.pop(size)
                if rest:
                    self._free[size] = rest  # as the size that was asked for last
        if raw is None:
            raw = np.empty(size, np.uint8)  # numpy asks for huge pages
        loan = raw[:nbytes].view(Buffer)
        loan.pool = self
        return loan

    def _take_back(self, raw: Any) -> None:
        while raw.base is not None:  # a view of what was allocated
            raw = raw.base
        with self._lock:
            while self._free and self.held_bytes + len(raw) > self._kept_bytes:
                self._forget_one()
            if self.held_bytes + len(raw) <= self._kept_bytes:
                self._free.setdefault(len(raw), []).append(raw)
                self.held_bytes += len(raw)

    def _forget_one(self) -> None:
        """Give the memory back whose size has not been asked for longest."""
        size, buffers = next(iter(self._free.items()))
        buffers.pop(0)
        self.held_bytes -= size
        if not buffers:
            del self._free[size]


POOL = Pool()
