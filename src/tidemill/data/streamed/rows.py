"""Examples of data larger than memory, each made when it is asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tidemill.data import readers
from tidemill.data.source import Example, FileRows, PassedOver
from tidemill.data.streamed.shuffled import scattered
from tidemill.data.streamed.stores import KINDS, Store, open_store
from tidemill.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tidemill.recipe.config import Data

STREAMED_FROM = 1 << 30  # bytes; read whole, they would take three to five times as much memory
Lacking = Callable[[Example], DataError | None]


@dataclass(frozen=True, slots=True)
class StreamedRows:
    """Implements `Source`. A row that cannot be used is a DataError when its turn comes, so that the next one is taken
    or the run ends; one that is held out, or blank, is passed over."""

    name: str
    store: Store
    make: Callable[[readers.Row], tuple[Example | readers.BadRow, DataError | None]]
    kept_out: frozenset[bytes] = frozenset()  # digests of held-out problems
    lacking: tuple[Lacking, ...] = ()
    must_be_good: bool = True  # a bad row ends the run, instead of being left out

    @property
    def size(self) -> int:
        return len(self.store)

    def shuffled(self, place: int, key: tuple[int, ...]) -> int:
        return self.store.shuffled(place, key)

    def example(self, index: int) -> Example:
        row = self.store.row(index)
        if row is None:
            raise PassedOver(f"{self.name}: row {index + 1} is blank")
        made, error = self.make(row)
        if isinstance(made, readers.BadRow):
            raise error or DataError(f"{made.where}: {made.why}", readers.REMEDY)
        if self.kept_out and digest(made) in self.kept_out:
            raise PassedOver(f"{made.where}: the row is held out")
        for lacking in self.lacking:
            if problem := lacking(made):
                raise problem
        return made

    def sample(self, count: int) -> list[Example]:
        """Rows at even distances. A bad one is an error, unless such rows are left out."""
        found = []
        for index in self.spread(count):
            try:
                found.append(self.example(index))
            except PassedOver:
                continue
            except DataError as error:
                if self.must_be_good:
                    raise
                problem = error
        if not found:
            raise DataError(f"{self.name}: none of {count} rows can be used", problem.message)
        return found

    def usable(self, indices: Sequence[int]) -> Iterator[Example]:
        """Those of these rows that can be used."""
        for index in indices:
            try:
                yield self.example(index)
            except DataError:
                continue

    def spread(self, count: int) -> list[int]:
        """Rows at even distances."""
        return sorted({*np.linspace(0, self.size - 1, min(count, self.size)).astype(np.int64).tolist()})

    def split(self, held_out: int, seed: int) -> tuple[StreamedRows, FileRows]:
        """Keep rows aside, the same ones for the same seed."""
        aside: dict[bytes, Example] = {}
        tried = 0
        while len(aside) < held_out and tried < self.size:
            index = scattered(tried, self.size, seed, -2)
            aside.update((digest(example), example) for example in self.usable([index]))
            tried += 1
        if tried == self.size:
            raise DataError(
                f"{self.name}: data.held_out keeps {held_out} rows for evaluation: none is left to train on",
                "lower data.held_out, or name held-out data with data.eval_source",
            )
        return self.without(list(aside.values())), FileRows(f"{self.name} (held out)", tuple(aside.values()))

    def without(self, aside: Sequence[Example]) -> StreamedRows:
        return replace(self, kept_out=self.kept_out | {digest(example) for example in aside})

    def needing(self, lacking: Lacking) -> StreamedRows:
        """The same, in which a row that lacks something cannot be used."""
        return replace(self, lacking=(*self.lacking, lacking))


def digest(example: Example) -> bytes:
    return hashlib.blake2b(example.problem.encode(), digest_size=12).digest()


def are_streamed(files: Sequence[Path], data: Data) -> bool:
    can_be = all(file.suffix.lower() in KINDS for file in files)
    if data.stream is True and not can_be:
        raise ConfigError(
            f"data.stream is true, but {files[0]} cannot be read row by row",
            f"convert it to one of {', '.join(KINDS)}, or set data.stream=auto",
        )
    if data.stream != "auto":
        return data.stream
    return can_be and sum(file.stat().st_size for file in files) >= STREAMED_FROM


def open_rows(path: str, files: Sequence[Path], data: Data) -> StreamedRows:
    rows = StreamedRows(path, open_store(files), readers.maker(data), must_be_good=data.on_bad_row == "fail")
    if not rows.size:
        raise DataError(f"{path} is empty: it has no rows", "check how the file was written")
    return rows
