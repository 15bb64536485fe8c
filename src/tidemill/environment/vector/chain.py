"""What became of a vector's environments, fragment after fragment: their moves, so that any process can restore them.

A fragment ends wherever its environments are, mostly in the middle of an episode, and the next one goes on from there.
An environment's state can rarely be saved. But its episode began with a seed, and everything since is its moves: played
again they lead to the same state. So a vector's file has a record of each fragment, all of one size, and a fragment
that is made again overwrites its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FOLDER = "environments"
MAGIC = 0x74_6D_76_31
HEAD = 64  # bytes: magic, size of a record, number of the first record that counts

Array = npt.NDArray[Any]


class Chain:
    """`fields`: name → (dtype, shape) of what a record holds."""

    def __init__(self, path: Path, fields: Mapping[str, tuple[type, tuple[int, ...]]]) -> None:
        self.path, self.form = path, np.dtype([("number", np.int64), *((n, d, s) for n, (d, s) in fields.items())])

    def write(self, number: int, **record: Array | float) -> None:
        """Keep a fragment's record. It is whole once the next one is asked for: its number is written last."""
        made = np.zeros((), self.form)
        for name, value in record.items():
            made[name] = value
        made["number"] = number + 1  # 0: nothing was written here
        file = self._open()
        try:
            at = HEAD + number * self.form.itemsize
            raw = made.tobytes()
            os.pwrite(file, bytes(8), at)
            os.pwrite(file, raw[8:], at + 8)
            os.pwrite(file, raw[:8], at)
        finally:
            os.close(file)

    def read(self, number: int) -> Any:
        """The record of a fragment; None where there is none."""
        if number < 0:
            return None
        try:
            file = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            if os.pread(file, 16, 0) != self._head():
                return None
            raw = os.pread(file, self.form.itemsize, HEAD + number * self.form.itemsize)
        finally:
            os.close(file)
        if len(raw) < self.form.itemsize:
            return None
        found = np.frombuffer(raw, self.form)[0]
        return found if int(found["number"]) == number + 1 else None

    def _head(self) -> bytes:
        return np.array([MAGIC, self.form.itemsize], np.int64).tobytes()

    def _open(self) -> int:
        """The file, begun anew where its records have another form: environments of other settings do not go on."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        if os.pread(file, 16, 0) != self._head():
            os.ftruncate(file, 0)
            os.pwrite(file, self._head(), 0)
        return file
