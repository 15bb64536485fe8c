"""Counts: stages send counts of rows with their commits; they are kept with the rows, and reported when the rows have
left. So no worker can die between making something and counting it, and a row counts once however often it was made:
its counts are discarded when it goes back to be made again."""

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
    """One commit's counts: for each name a value per row, in their order; None where a row has none."""

    sums: dict[str, list[float | None]] = field(default_factory=dict)  # added up
    means: dict[str, list[float | None]] = field(default_factory=dict)  # averaged

    @staticmethod
    def of_rows(sums: Sequence[Mapping[str, float]], means: Sequence[Mapping[str, float]]) -> Counts:
        """Make counts from each row's."""
        return Counts(_columns(sums), _columns(means))

    def check(self, rows: int) -> None:
        for name, values in chain(self.sums.items(), self.means.items()):
            if len(values) != rows:
                raise DockError(f"{len(values)} counts of {name!r} came for {rows} rows")


@dataclass(frozen=True, slots=True)
class Tallied:
    """Counts of rows that have left since the last report. `number`: of this report."""

    number: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    means: dict[str, tuple[float, int]] = field(default_factory=dict)  # sum, and number of values


class CountBook:
    """The ledger's counts. They change only with the ledger's steps, so that a journal restores them."""

    def __init__(self) -> None:
        self.number = 0  # number of the last report
        self._rows: dict[int, list[tuple[Names, Values]]] = {}  # of rows that are here
        self._left: Kept = {}  # of rows that have left, to be reported
        self._told: Kept = {}  # reported, but not known to have arrived

    def note(self, ids: Ints, counts: Counts) -> None:
        names = tuple(counts.sums), tuple(counts.means)
        of_rows = zip(*counts.sums.values(), *counts.means.values())
        nothing = (None,) * sum(map(len, names))
        for i, values in zip(ids.tolist(), of_rows):
            if values == nothing:  # what counts once for a group is with one of its rows
                continue
            self._rows.setdefault(i, []).append((names, values))

    def leave(self, ids: Ints) -> None:
        """These rows have ended: keep their counts for the report."""
        if not self._rows:
            return
        for i in ids.tolist():
            for names, values in self._rows.pop(i, ()):
                self._left.setdefault(names, []).append(values)

    def forget(self, ids: Ints) -> None:
        """Discard the counts of rows that are made again."""
        for i in ids.tolist() if self._rows else ():
            self._rows.pop(i, None)

    def tell(self, heard: int) -> Tallied:
        """Report. `heard`: the last report that arrived. A report that did not arrive is repeated, with what came
        since."""
        if heard != self.number:
            for names, listed in self._left.items():
                self._told.setdefault(names, []).extend(listed)
            self._left = self._told
        self._told, self._left = self._left, {}
        self.number += 1
        return _tallied(self.number, self._told)

    def dump(self) -> dict[str, Any]:
        """Return plain values, for a snapshot."""
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
    """Sum with a single rounding, so that the order in which rows left does not show."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # infinities of both signs, or beyond what a float holds
        return sum(values)


def _names(raw: Sequence[Sequence[str]]) -> Names:
    return tuple(raw[0]), tuple(raw[1])
