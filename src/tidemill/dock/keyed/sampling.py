"""How a keyed table chooses among ready rows: the first ones, or by what the table's creator named, which may remember
what it answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tidemill import imports
from tidemill.dock.ledger.records import Ints
from tidemill.errors import DockError

Chosen = tuple[Sequence[int] | Ints, Sequence[int] | Ints]  # rows for the consumer, and those that it consumes


class Sampler(Protocol):
    def __call__(self, ready: Ints, rows: int, **config: Any) -> Chosen:
        """Choose among `ready`. The partition that they are of comes as `partition`."""

    def has_cached_result(self, partition: str, task: str, config: Mapping[str, Any]) -> bool:
        """Say whether this question was answered before and gets the same answer."""

    def clear_cache(self, partition: str) -> None: ...

    def dumped(self) -> bytes:
        """Return what it remembers, for a restart."""

    def load(self, state: bytes) -> None: ...


class First:
    """Gives the rows with the lowest numbers, each once."""

    def __call__(self, ready: Ints, rows: int, **_: Any) -> Chosen:
        return ready[:rows], ready[:rows]

    def has_cached_result(self, partition: str, task: str, config: Mapping[str, Any]) -> bool:
        return False

    def clear_cache(self, partition: str) -> None:
        pass

    def dumped(self) -> bytes:
        return b""

    def load(self, state: bytes) -> None:
        pass


def sampler_of(path: str, folder: Path) -> Sampler:
    """Return what the function at an import path makes of the dock's folder; without a path, `First`."""
    made: Sampler = imports.load(path, DockError, "keyed.sampler")(folder) if path else First()
    return made
