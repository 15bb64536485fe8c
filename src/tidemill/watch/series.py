"""A run's metrics as columns of float32, filled as the file grows, and thinned to what a screen can show."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.watch import lines

PROBES = 240  # lines read of a long file before it is indexed: enough for a first picture
SOON = 4 << 20  # bytes that are indexed while a request waits
SLICE = 1 << 20  # bytes indexed between two chances for a request
NAN = float("nan")
BLOCK_ROWS = 4096

Floats = np.ndarray[Any, np.dtype[np.float32]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Curve:
    steps: list[int]
    values: list[float]


class Table:
    """Rows in the order of their lines; a metric that a row lacks is NaN there. Kept in blocks that never move, so that
    growing takes no second copy."""

    def __init__(self) -> None:
        self.rows = 0
        self.names: dict[str, int] = {}
        self._blocks: list[Floats] = []
        self._steps: list[Ints] = []
        self._best: tuple[float, int] | None = None  # the highest reward and its row
        self._keys: tuple[str, ...] = ()  # of the last row, and where its values go: most rows are alike
        self._places: Ints = np.zeros(0, np.int64)

    def add(self, row: dict[str, Any]) -> None:
        step = row.pop("step")
        keys, at = tuple(row), self.rows % BLOCK_ROWS
        if keys != self._keys:
            self._places = np.array([self.names.setdefault(key, len(self.names)) for key in keys], np.int64)
            self._keys = keys
        if not at:
            self._steps.append(np.zeros(BLOCK_ROWS, np.int64))
            self._blocks.append(np.full((BLOCK_ROWS, len(self.names)), NAN, np.float32))
        elif self._blocks[-1].shape[1] < len(self.names):
            missing = len(self.names) - self._blocks[-1].shape[1]
            self._blocks[-1] = np.pad(self._blocks[-1], ((0, 0), (0, missing)), constant_values=NAN)
        values = [value if isinstance(value, int | float) else NAN for value in row.values()]
        self._blocks[-1][at, self._places] = values
        self._steps[-1][at] = step
        reward = row.get("reward")
        if isinstance(reward, float) and (self._best is None or reward > self._best[0]):
            self._best = reward, self.rows
        self.rows += 1

    def column(self, name: str, first: int = 0, last: int = 1 << 60) -> tuple[Ints, Floats]:
        """Steps and values of the rows that have it, from `first` to `last`; blocks that hold none are passed over."""
        place = self.names.get(name)
        found: list[tuple[Ints, Floats]] = []
        for i, block in enumerate(self._blocks):
            if place is None or place >= block.shape[1]:
                continue
            count = min(BLOCK_ROWS, self.rows - i * BLOCK_ROWS)
            steps = self._steps[i][:count]
            if steps[-1] < first or steps[0] > last:
                continue
            begin, end = np.searchsorted(steps, (first, last + 1))
            values = block[begin:end, place]
            keep = np.isfinite(values)
            found.append((steps[begin:end][keep], values[keep]))
        if not found:
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        return np.concatenate([steps for steps, _ in found]), np.concatenate([values for _, values in found])

    def curve(self, name: str, points: int, first: int, last: int) -> Curve:
        steps, values = self.column(name, first, last)
        at = thinned(values, points)
        return Curve(steps[at].tolist(), [float(f"{v:.6g}") for v in values[at].tolist()])

    def telling(self) -> list[int]:
        """Rows that say how a run fares: of its first and last steps, and of the best."""
        steps = [i for i in (*range(min(40, self.rows)), *range(max(0, self.rows - 60), self.rows)) if self._is_step(i)]
        best = [] if self._best is None else [self._best[1]]
        return sorted({*steps[:20], *steps[-30:], *best})

    def _is_step(self, index: int) -> bool:
        """Not a line of an evaluation."""
        block, place = self._blocks[index // BLOCK_ROWS], self.names.get("time/step")
        return place is not None and place < block.shape[1] and bool(np.isfinite(block[index % BLOCK_ROWS, place]))

    def row(self, index: int) -> dict[str, float]:
        block, at = self._blocks[index // BLOCK_ROWS], index % BLOCK_ROWS
        values = block[at].tolist()
        found = {name: values[i] for name, i in self.names.items() if i < len(values) and values[i] == values[i]}
        return {"step": float(self._steps[index // BLOCK_ROWS][at]), **found}


def thinned(values: Floats, points: int) -> Ints:
    """Indices of at most `points` values: the smallest and the largest of every bucket, so that no spike is lost."""
    count, buckets = len(values), max(1, points // 2)
    if count <= points:
        return np.arange(count)
    size = -(-count // buckets)
    whole = count // size * size
    rows = values[:whole].reshape(-1, size)
    base = np.arange(len(rows)) * size
    found = [base + rows.argmin(1), base + rows.argmax(1)]
    if whole < count:
        found.append(whole + np.array([values[whole:].argmin(), values[whole:].argmax()]))
    return np.unique(np.concatenate(found))


class Series:
    """The metrics file of one run. `advance` takes in what is new; a file that was cut or replaced is read anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self.table, self.offset, self._inode = Table(), 0, -1

    @property
    def is_whole(self) -> bool:
        return self.offset >= lines.whole_end(self.path)

    def advance(self, budget: int = SLICE) -> bool:
        """Take in up to `budget` bytes; whether there is more."""
        try:
            stat = self.path.stat()
        except OSError:
            self._forget()
            return False
        with self.lock:
            if stat.st_ino != self._inode or stat.st_size < self.offset:
                self._forget()
                self._inode = stat.st_ino
            end = min(stat.st_size, self.offset + budget)
            for start, line in lines.forward(self.path, self.offset, end):
                row = lines.parse(line)
                if row is not None and isinstance(row.get("step"), int):
                    self.table.add(row)
                self.offset = start + len(line) + 1
            return end < stat.st_size

    def curves(
        self, names: Iterable[str], points: int, first: int = 0, last: int = 1 << 60
    ) -> tuple[dict[str, Curve], bool]:
        """Thinned curves, and whether every line is in them: a long file is shown by probes until it is indexed."""
        self.advance(SOON)
        is_whole = self.is_whole
        with self.lock:
            table = self.table if is_whole else self._probed()
            return {name: table.curve(name, points, first, last) for name in names}, is_whole

    def names(self) -> list[str]:
        self.advance(SOON)
        with self.lock:
            table = self.table if self.table.rows else self._probed()
            return list(table.names)

    def last(self) -> dict[str, float]:
        """The newest of every metric among the last lines."""
        found: dict[str, Any] = {}
        end = lines.whole_end(self.path)
        for count, (_, line) in enumerate(lines.backward(self.path, end)):
            found = (lines.parse(line) or {}) | found
            if count >= 3:
                break
        return {name: value for name, value in found.items() if isinstance(value, int | float)}

    def telling(self) -> list[dict[str, float]]:
        """The rows that say how a run fares: its first and last steps, and its best."""
        with self.lock:
            return [self.table.row(i) for i in self.table.telling()]

    def _probed(self) -> Table:
        table, end = Table(), lines.whole_end(self.path)
        if not end:
            return table
        seen = -1
        with self.path.open("rb") as file:
            for i in range(PROBES + 1):
                found = lines.line_after(file, i * max(0, end - SLICE // 64) // PROBES, end)
                if found is None or found[0] <= seen:
                    continue
                seen = found[0]
                row = lines.parse(found[1])
                if row is not None and isinstance(row.get("step"), int):
                    table.add(row)
        return table
