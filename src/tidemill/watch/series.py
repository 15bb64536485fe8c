"""A run's metrics as columns of float32, filled as the file grows, and thinned to what a screen can show."""

from __future__ import annotations

import threading
from array import array
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

Floats = np.ndarray[Any, np.dtype[np.float32]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Curve:
    steps: list[int]
    values: list[float]


class Table:
    """Rows in the order of their lines; a metric that a row lacks is NaN there."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.columns: dict[str, array[float]] = {}

    def add(self, row: dict[str, Any]) -> None:
        count = len(self.steps)
        self.steps.append(row.pop("step"))
        for name, value in row.items():
            column = self.columns.get(name)
            if column is None:
                column = self.columns[name] = array("f", [NAN]) * count
            elif len(column) < count:
                column.extend([NAN] * (count - len(column)))
            column.append(value if isinstance(value, int | float) else NAN)

    def curve(self, name: str, points: int, first: int, last: int) -> Curve:
        column = self.columns.get(name)
        if column is None:
            return Curve([], [])
        values = np.array(column, np.float32)
        steps = np.array(self.steps[: len(values)], np.int64)
        keep = np.isfinite(values) & (steps >= first) & (steps <= last)
        at = thinned(values[keep], points)
        chosen = values[keep][at]
        return Curve(steps[keep][at].tolist(), [float(f"{v:.6g}") for v in chosen.tolist()])

    def row(self, index: int) -> dict[str, float]:
        found = {name: float(c[index]) for name, c in self.columns.items() if index < len(c) and c[index] == c[index]}
        return {"step": float(self.steps[index]), **found}


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
            table = self.table if self.table.columns else self._probed()
            return list(table.columns)

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
            timed = self.table.columns.get("time/step", array("f"))
            rows = [i for i, seconds in enumerate(timed) if seconds == seconds]
            reward = self.table.columns.get("reward")
            best = [max((i for i in rows if i < len(reward)), key=lambda i: _low(reward[i]))] if reward and rows else []
            chosen = sorted({*rows[:20], *rows[-30:], *best})
            return [self.table.row(i) for i in chosen]

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


def _low(value: float) -> float:
    return value if value == value else float("-inf")
