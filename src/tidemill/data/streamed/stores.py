"""Rows of files by number, read where they lie: JSONL by an index of its lines, Arrow mapped into memory, Parquet one
row group at a time. What is held does not grow with the file."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tidemill.data.readers import Row, parsed_line, pyarrow, readable
from tidemill.data.streamed.shuffled import scattered
from tidemill.errors import DataError
from tidemill.models.box.known import cache

log = logging.getLogger("tidemill.data")

PIECE = 1 << 24  # bytes of a file that are searched for line ends at once
GROUPS = 2  # row groups of a Parquet file that stay decoded
KINDS = (".jsonl", ".parquet", ".arrow")


class Store(Protocol):
    def __len__(self) -> int: ...

    def row(self, index: int) -> Row | None:
        """Read one row; None: a blank line."""

    def shuffled(self, place: int, key: tuple[int, ...]) -> int:
        """Return which row comes at a place of a shuffled pass."""


class Lines:
    """A JSONL file. Where its lines begin is found once and kept in the cache folder, eight bytes a line."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.ends = line_ends(file)
        self.descriptor = os.open(file, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    def __len__(self) -> int:
        return len(self.ends)

    def row(self, index: int) -> Row | None:
        begin = int(self.ends[index - 1]) if index else 0
        line = os.pread(self.descriptor, int(self.ends[index]) - begin, begin)
        return parsed_line(self.file, index + 1, line)

    def shuffled(self, place: int, key: tuple[int, ...]) -> int:
        return scattered(place, len(self), *key)


def line_ends(file: Path) -> npt.NDArray[np.uint64]:
    """Where each line ends, mapped from the cache folder; found first if the file has changed or is new."""
    what = file.stat()
    name = f"{file.resolve()} {what.st_size} {what.st_mtime_ns}"
    kept = cache() / "data" / "lines" / f"{hashlib.blake2b(name.encode(), digest_size=12).hexdigest()}.u64"
    if not kept.exists():
        log.info("finding the lines of %s (%.1f GB), once", file, what.st_size / 1e9)
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            scratch = kept.with_suffix(f".{os.getpid()}")
            _find_ends(file, scratch)
            os.replace(scratch, kept)
        except OSError:  # a cache that cannot be written
            with tempfile.NamedTemporaryFile(suffix=".u64") as own:
                _find_ends(file, Path(own.name))
                return np.memmap(own.name, np.uint64, "r")  # outlives its name
    return np.memmap(kept, np.uint64, "r")


def _find_ends(file: Path, to: Path) -> None:
    at = last = 0
    with file.open("rb") as source, to.open("wb") as out:
        while piece := source.read(PIECE):
            ends = np.flatnonzero(np.frombuffer(piece, np.uint8) == ord("\n")).astype(np.uint64) + np.uint64(at + 1)
            out.write(ends.tobytes())
            at, last = at + len(piece), int(ends[-1]) if len(ends) else last
        if last < at:  # a last line without its end
            out.write(np.array([at], np.uint64).tobytes())


class ArrowRows:
    """An Arrow file, as Hugging Face's save_to_disk writes it."""

    def __init__(self, file: Path) -> None:
        arrow = pyarrow(file)
        self.file = file
        with readable(arrow, file, "Arrow"):
            mapped = arrow.memory_map(str(file))
            try:
                self.table = arrow.ipc.open_stream(mapped).read_all()
            except arrow.ArrowInvalid:
                self.table = arrow.ipc.open_file(mapped).read_all()

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def row(self, index: int) -> Row | None:
        return f"{self.file}:row {index + 1}", self.table.slice(index, 1).to_pylist()[0]

    def shuffled(self, place: int, key: tuple[int, ...]) -> int:
        return scattered(place, len(self), *key)


class RowGroups:
    """A Parquet file. Its rows are shuffled within their row group, and the groups among each other, because a group
    is decoded whole."""

    def __init__(self, file: Path) -> None:
        self.arrow = pyarrow(file)
        self.file = file
        with readable(self.arrow, file, "Parquet"):
            self.parquet = self.arrow.parquet.ParquetFile(file, memory_map=True)
        about = self.parquet.metadata
        self.sizes = [about.row_group(i).num_rows for i in range(about.num_row_groups)]
        self.ends = list(accumulate(self.sizes))
        self.parts = Parts(self.sizes)
        self.decoded: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def row(self, index: int) -> Row | None:
        group = bisect_right(self.ends, index)
        if group not in self.decoded:
            while len(self.decoded) >= GROUPS:
                self.decoded.popitem(last=False)
            with readable(self.arrow, self.file, "Parquet"):
                self.decoded[group] = self.parquet.read_row_group(group)
        self.decoded.move_to_end(group)
        inside = index - (self.ends[group] - self.sizes[group])
        return f"{self.file}:row {index + 1}", self.decoded[group].slice(inside, 1).to_pylist()[0]

    def shuffled(self, place: int, key: tuple[int, ...]) -> int:
        which, begin, inside = self.parts.at(place, key)
        return begin + scattered(inside, self.sizes[which], *key, which)


class Chained:
    """Several files one after another. Shuffled, the files change places, and each is shuffled by itself."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = list(stores)
        self.sizes = [len(store) for store in self.stores]
        self.ends = list(accumulate(self.sizes))
        self.parts = Parts(self.sizes)

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def row(self, index: int) -> Row | None:
        which = bisect_right(self.ends, index)
        return self.stores[which].row(index - (self.ends[which] - self.sizes[which]))

    def shuffled(self, place: int, key: tuple[int, ...]) -> int:
        which, begin, inside = self.parts.at(place, key)
        return begin + self.stores[which].shuffled(inside, (*key, which))


class Parts:
    """The order of a file's row groups, or of several files, in each shuffled pass; that of the last two is kept."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = np.array(sizes, np.int64)
        self.begins = np.cumsum(self.sizes) - self.sizes
        self.passes: OrderedDict[tuple[int, ...], tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = OrderedDict()

    def at(self, place: int, key: tuple[int, ...]) -> tuple[int, int, int]:
        """Return the part that a place of the pass lies in, the part's first row, and the place within it."""
        if key not in self.passes:
            while len(self.passes) >= 2:
                self.passes.popitem(last=False)
            order = np.array([scattered(i, len(self.sizes), *key) for i in range(len(self.sizes))], np.int64)
            self.passes[key] = order, np.cumsum(self.sizes[order])
        order, ends = self.passes[key]
        turn = int(np.searchsorted(ends, place, "right"))
        which = int(order[turn])
        return which, int(self.begins[which]), place - int(ends[turn] - self.sizes[which])


def open_store(files: Sequence[Path]) -> Store:
    kinds: dict[str, Callable[[Path], Store]] = {".jsonl": Lines, ".arrow": ArrowRows, ".parquet": RowGroups}
    for file in files:
        if file.suffix.lower() not in kinds:
            raise DataError(f"{file} cannot be read row by row", f"data.stream takes {', '.join(kinds)}")
        if file.stat().st_size == 0:
            raise DataError(f"{file} is empty: it has no bytes", "check how the file was written or copied")
    stores = [kinds[file.suffix.lower()](file) for file in files]
    return stores[0] if len(stores) == 1 else Chained(stores)
