"""Which part of a row holds which columns, and which stages read them: columns and stages as bits of a mask."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tidemill.dock.ledger.controller import Controller
from tidemill.dock.ledger.records import META


class Columns:
    """Part 0 of a row came with its put and has whatever was put; part s+1 came with the commit of stage s."""

    def __init__(self, controllers: Sequence[Controller], bits: dict[str, int]) -> None:
        self._controllers, self._bits = controllers, bits
        self._of_part = [set[str]()] + [set(c.stage.writes) for c in controllers]
        self._masks: dict[tuple[str, ...], np.uint64] = {}
        self._parts: dict[tuple[str, ...], list[int]] = {}
        self.readers = self._find_readers()  # by part, the stages that read something of it

    @property
    def source(self) -> set[str]:
        return self._of_part[0]

    def mask(self, columns: tuple[str, ...]) -> np.uint64:
        if columns not in self._masks:
            self._masks[columns] = np.uint64(sum(self._bits.get(column, 0) for column in {*columns, *META[:2]}))
        return self._masks[columns]

    def parts_with(self, columns: tuple[str, ...]) -> list[int]:
        """Parts that may hold some of these columns."""
        if columns not in self._parts:
            self._parts[columns] = [i for i, names in enumerate(self._of_part) if not names.isdisjoint(columns)]
        return self._parts[columns]

    def learn_source(self, columns: tuple[str, ...]) -> None:
        """What a put brought; other puts may bring more."""
        if not self.source.issuperset(columns):
            self.source.update(columns)
            self._parts.clear()
            self.readers = self._find_readers()

    def _find_readers(self) -> list[np.uint64]:
        return [
            np.uint64(sum(int(c.bit) for c in self._controllers if not names.isdisjoint(c.stage.reads)))
            for names in self._of_part
        ]
