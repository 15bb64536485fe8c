"""Fragments: what the environments of a vector came to in one step of the run, as rows for the dock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.batch import LENGTH, VERSION, Batch, Column
from tidemill.dock import Counts
from tidemill.rollout.engine import Completion

Array = npt.NDArray[Any]


@dataclass(slots=True)
class Episodes:
    """The episodes that ended in a fragment."""

    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class Fragment:
    """All rows of a group. Arrays are (ticks, rows, …); `made` says at which ticks a row had a decision to make."""

    columns: dict[str, Array]
    made: Array
    of_rows: dict[str, Array]  # one value a row
    version: int
    episodes: Episodes
    shown: float  # mean return of the episodes that ended last
    is_again: bool = False  # made from its record, and counted when it was made first


@dataclass(slots=True)
class Made(Completion):
    """One row of a fragment that is done. The first row carries the fragment."""

    fragment: Fragment | None = None


def outputs(completions: list[Completion]) -> tuple[Batch, Counts | None]:
    """What is committed for a group."""
    first = completions[0]
    assert isinstance(first, Made) and first.fragment is not None
    found = first.fragment
    return columns_of(found), None if found.is_again else counts_of(found)


def columns_of(fragment: Fragment) -> Batch:
    made = fragment.made.T  # (rows, ticks)
    rows, ticks = made.shape
    lengths = made.sum(1)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    is_whole = bool(made.all())
    columns: dict[str, Any] = {}
    for name, values in fragment.columns.items():
        by_row = values.swapaxes(0, 1)
        tail = by_row.shape[2:]
        flat = by_row.reshape(rows * ticks, *tail) if is_whole else by_row[made]
        columns[name] = Column(np.ascontiguousarray(flat), offsets)
    count = int(offsets[-1])
    columns["mask"] = Column(np.ones(count, np.uint8), offsets)
    columns["versions"] = Column(np.full(count, fragment.version, np.int32), offsets)
    columns |= fragment.of_rows
    columns[VERSION] = np.full(rows, fragment.version, np.int32)
    columns[LENGTH] = lengths.astype(np.int32)
    return Batch(columns)


def counts_of(fragment: Fragment) -> Counts:
    """What counts once for the group is kept with its first row."""
    rows = fragment.made.shape[1]
    steps = fragment.made.sum(0).astype(float).tolist()
    episodes = fragment.episodes
    first: dict[str, float] = {"reward": fragment.shown}
    if episodes.returns:
        first |= {"episode_length": float(np.mean(episodes.lengths))}
        first |= {f"environment/{name}": float(np.mean(values)) for name, values in episodes.parts.items()}
    sums: list[Mapping[str, float]] = [{"made_tokens": n, "prompt_tokens": 0.0} for n in steps]
    sums[0] = {**sums[0], "episodes": float(len(episodes.returns))}
    means: list[Mapping[str, float]] = [first, *({} for _ in range(rows - 1))]
    return Counts.of_rows(sums, means)
