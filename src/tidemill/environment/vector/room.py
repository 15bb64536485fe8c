"""The memory that environments in other processes share with their caller, and the bells by which they take turns.

Observations, rewards and moves lie in one mapping; nothing is sent. A bell is a counter: its waiter looks at it for a
moment, because the other side is mostly just about to ring it, and then sleeps at a socket until a byte comes.
"""

from __future__ import annotations

import math
import mmap
import os
import select
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.models.spaces import Spaces

Array = npt.NDArray[Any]
LOOK_NS = 150_000  # a waiter looks this long before it sleeps: waking it costs about a third of it
SLEEP_S = 0.005  # a byte may have been sent just before the waiter slept: it looks again this often
ALIGN = 64


def fields(count: int, workers: int, spaces: Spaces) -> dict[str, tuple[type, tuple[int, ...]]]:
    observations = np.uint8 if spaces.pixels else np.float32
    moves: tuple[type, int] = (np.int64, len(spaces.choices)) if spaces.choices else (np.float32, spaces.dimensions)
    return {
        "bells": (np.int64, (workers, 4, 8)),  # a cache line each: asked, answered, worker sleeps, owner sleeps
        "asks": (np.int64, (1,)),  # what for
        "chosen": (np.uint8, (count,)),
        "seeds": (np.int64, (count,)),
        "moves": (moves[0], (count, moves[1])),
        "observations": (observations, (count, *spaces.observation)),
        "finals": (observations, (count, *spaces.observation)),
        "rewards": (np.float64, (count,)),
        "ends": (np.uint8, (count,)),
    }


class Room:
    """The arrays, by name, over a file that has no name."""

    def __init__(self, form: Mapping[str, tuple[type, tuple[int, ...]]], handle: int | None = None) -> None:
        sizes = {name: -(-math.prod(s) * np.dtype(d).itemsize // ALIGN) * ALIGN for name, (d, s) in form.items()}
        self.handle = _unnamed(sum(sizes.values())) if handle is None else handle
        self._memory = mmap.mmap(self.handle, sum(sizes.values()))
        self.arrays: dict[str, Array] = {}
        at = 0
        for name, (dtype, shape) in form.items():
            self.arrays[name] = np.frombuffer(self._memory, dtype, math.prod(shape), at).reshape(shape)
            at += sizes[name]

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def close(self) -> None:
        """The mapping ends with the last array over it."""
        self.arrays.clear()
        os.close(self.handle)


def _unnamed(size: int) -> int:
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryFile(dir=folder) as file:
        os.ftruncate(file.fileno(), size)
        return os.dup(file.fileno())


class Bell:
    """One end of a worker's pair of counters. `mine` is rung here, `theirs` is waited for."""

    def __init__(self, cells: Array, end: socket.socket, is_worker: bool) -> None:
        asked, answered, worker_sleeps, owner_sleeps = (cells[i, :1] for i in range(4))
        self.mine, self.theirs = (answered, asked) if is_worker else (asked, answered)
        self._i_sleep, self._they_sleep = (worker_sleeps, owner_sleeps) if is_worker else (owner_sleeps, worker_sleeps)
        self.end = end
        self._waiting = select.poll()  # unlike select, not limited to the first 1024 files
        self._waiting.register(end, select.POLLIN)

    def ring(self, value: int) -> None:
        self.mine[0] = value
        if self._they_sleep[0]:
            self.end.send(b"!")

    def wait(self, value: int, within_s: float | None = None) -> bool:
        """Until the other has rung this far; whether it has. EOFError when the other end is gone."""
        theirs = self.theirs
        until = time.perf_counter_ns() + LOOK_NS
        while theirs[0] < value:
            if time.perf_counter_ns() > until:
                return self._sleep(value, within_s)
        return True

    def _sleep(self, value: int, within_s: float | None) -> bool:
        deadline = None if within_s is None else time.monotonic() + within_s
        pause = SLEEP_S
        self._i_sleep[0] = 1
        try:
            while self.theirs[0] < value:
                if self._waiting.poll(pause * 1000) and not self.end.recv(64):
                    raise EOFError
                pause = min(0.2, pause * 1.5)
                if deadline is not None and time.monotonic() > deadline and self.theirs[0] < value:
                    return False
            return True
        finally:
            self._i_sleep[0] = 0
