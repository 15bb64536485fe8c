"""Counts: what stages count of rows comes with their commits, is kept beside the rows, and is told when they have left.

So nobody can die between making something and counting it, and a row counts once however often it was made: what was
counted of it is forgotten when it goes back to be made again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.errors import DockError

Ints = npt.NDArray[np.int64]
Names = tuple[tuple[str, ...], tuple[str, ...]]  # of sums, of means
Values = tuple[float | None, ...]  # of one row, in the order of its names
Kept = dict[Names, list[Values]]


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one commit: by name a value for each of its rows, in their order; None where nothing was counted of a row."""

    sums: dict[str, list[float | None]] = field(default_factory=dict)  # added up
    means: dict[str, list[float | None]] = field(default_factory=dict)  # averaged

    @staticmethod
    def of_rows(sums: Sequence[Mapping[str, float]], means: Sequence[Mapping[str, float]]) -> Counts:
        """From what was counted of each row."""
        return Counts(_columns(sums), _columns(means))

    def check(self, rows: int) -> None:
        for name, values in chain(self.sums.items(), self.means.items()):
            if len(values) != rows:
                raise DockError(f"{len(values)} counts of {name!r} came for {rows} rows")


@dataclass(frozen=True, slots=True)
class Tallied:
    """What was counted of rows that have left since the last telling. `number`: of this one."""

    number: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    means: dict[str, tuple[float, int]] = field(default_factory=dict)  # sum, and of how many


class CountBook:
    """The ledger's. It changes with the ledger's steps alone, so that a journal brings it back."""

    def __init__(self) -> None:
        self.number = 0  # of the last telling
        self._rows: dict[int, list[tuple[Names, Values]]] = {}  # of rows that are here
        self._left: Kept = {}  # of rows that have left, to be told
        self._told: Kept = {}  # told, but whether it was heard is not known

    def note(self, ids: Ints, counts: Counts) -> None:
        names = tuple(counts.sums), tuple(counts.means)
        of_rows = zip(*counts.sums.values(), *counts.means.values())
        for i, values in zip(ids.tolist(), of_rows):
            self._rows.setdefault(i, []).append((names, values))

    def leave(self, ids: Ints) -> None:
        """These rows have ended: what was counted of them stands."""
        if not self._rows:
            return
        for i in ids.tolist():
            for names, values in self._rows.pop(i, ()):
                self._left.setdefault(names, []).append(values)

    def forget(self, ids: Ints) -> None:
        """These rows begin anew, and so does counting."""
        for i in ids.tolist() if self._rows else ():
            self._rows.pop(i, None)

    def tell(self, heard: int) -> Tallied:
        """`heard`: the last telling that came through. One that did not is told again, with what came since."""
        if heard != self.number:
            for names, listed in self._left.items():
                self._told.setdefault(names, []).extend(listed)
            self._left = self._told
        self._told, self._left = self._left, {}
        self.number += 1
        return _tallied(self.number, self._told)

    def dump(self) -> dict[str, Any]:
        """As plain values, for a snapshot."""
        rows: dict[Names, list[tuple[int, Values]]] = {}
        for i, noted in self._rows.items():
            for names, values in noted:
                rows.setdefault(names, []).append((i, values))
        parts: dict[str, Mapping[Names, Any]] = {"rows": rows, "left": self._left, "told": self._told}
        return {"number": self.number} | {part: list(kept.items()) for part, kept in parts.items()}

    def load(self, record: Mapping[str, Any]) -> None:
        self.number = record["number"]
        self._left, self._told = (
            {_names(names): [tuple(values) for values in listed] for names, listed in record[part]}
            for part in ("left", "told")
        )
        for names, noted in record["rows"]:
            for i, values in noted:
                self._rows.setdefault(i, []).append((_names(names), tuple(values)))


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [float(row[name]) if name in row else None for row in rows] for name in names}


def _tallied(number: int, kept: Kept) -> Tallied:
    sums: dict[str, list[float]] = {}
    means: dict[str, list[float]] = {}
    for (summed, averaged), listed in kept.items():
        columns = zip(*listed)
        for names, found in ((summed, sums), (averaged, means)):
            for name, column in zip(names, columns):
                found.setdefault(name, []).extend(value for value in column if value is not None)
    return Tallied(
        number,
        {name: _total(values) for name, values in sums.items() if values},
        {name: (_total(values), len(values)) for name, values in means.items() if values},
    )


def _total(values: list[float]) -> float:
    """Rounded once: the order in which rows left does not show."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # infinities of both signs, or beyond what a float holds
        return sum(values)


def _names(raw: Sequence[Sequence[str]]) -> Names:
    return tuple(raw[0]), tuple(raw[1])
