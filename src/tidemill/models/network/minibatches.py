"""Which decisions each gradient step of an update learns from.

They are drawn from the decisions of all ranks, by the samples' ids: however samples are dealt out, and in whatever
order they arrive, each minibatch is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.models.network.network import Steps

Ints = npt.NDArray[np.int64]
Gather = Callable[[Any], list[Any]]  # a plain value of every rank


@dataclass(frozen=True, slots=True)
class Minibatch:
    units: Ints  # this rank's: decisions, or whole fragments of a policy with a memory
    decisions: int  # of all ranks
    is_reported: bool  # metrics are those of the last pass


def shuffled(
    steps: Steps | None, are_fragments: bool, epochs: int, most: int | None, seed: Sequence[int], gather: Gather
) -> Iterator[Minibatch]:
    """Every decision once in each of `epochs` passes, about `most` at a time (none: all)."""
    own, sizes = _places(steps, are_fragments, gather)
    if not len(sizes):
        return
    here = np.full(len(sizes), -1, np.int64)  # of every rank's units, which of this rank's it is
    here[own] = np.arange(len(own))
    count = max(1, round(float(sizes.sum()) / most)) if most else 1
    for i in range(epochs):
        order = np.random.Generator(np.random.Philox([*seed, i])).permutation(len(sizes))
        for chosen in np.array_split(order, min(count, len(order))):
            units = here[chosen]
            yield Minibatch(units[units >= 0], int(sizes[chosen].sum()), i == epochs - 1)


def _places(steps: Steps | None, are_fragments: bool, gather: Gather) -> tuple[Ints, Ints]:
    """Where this rank's units are among those of all ranks, in the order of samples' ids; decisions of each unit."""
    own = [] if steps is None else list(zip(steps.ids.tolist(), steps.lengths.tolist()))
    every = sorted(one for part in gather(own) for one in part)
    lengths = np.array([length for _, length in every], np.int64)
    units = np.ones(len(every), np.int64) if are_fragments else lengths
    starts = dict(zip((id for id, _ in every), (np.cumsum(units) - units).tolist()))
    mine = [np.arange(starts[id], starts[id] + (1 if are_fragments else length)) for id, length in own]
    sizes = lengths if are_fragments else np.ones(int(lengths.sum()), np.int64)
    return np.concatenate(mine) if mine else np.empty(0, np.int64), sizes


def drawn(steps: Steps | None, count: int, seed: Sequence[int], gather: Gather) -> Iterator[Minibatch]:
    """One decision of each sample, in so many minibatches; none while too few samples were made."""
    ranks = sum(gather(int(steps is not None)))
    units = np.empty(0, np.int64)
    if steps is not None:
        stream = np.random.Generator(np.random.Philox(list(seed)))
        starts = np.cumsum(steps.lengths) - steps.lengths
        units = stream.permutation(starts + stream.integers(0, steps.lengths))
    for own in np.array_split(units, count) if ranks else ():
        yield Minibatch(own, len(own) * ranks, True)
