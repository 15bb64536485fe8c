"""One update's samples over ranks: balanced by tokens in one decision, as many micro-batches on each rank.

Every rank is handed the same rows and makes the same decision, so nothing is exchanged. Micro-batches that run at the
same time are of like size, for ranks wait for each other in every layer; a rank with nothing left runs a filler.
"""

from __future__ import annotations

import numpy as np

from tidemill.batch import Batch
from tidemill.learn.packing import Ints, fill, microbatches, units

NOTHING = np.empty(0, np.int64)


def shares(
    batch: Batch, ranks: int, budget: int, share_prompts: bool, whole_groups: bool = False, at_least: int = 1
) -> list[list[Ints]]:
    """`[rank][i]`: rows of its i-th micro-batch, empty where it runs a filler. `at_least`: micro-batches per rank."""
    if ranks == 1 and at_least == 1:  # in the order in which they are found: sums of floats have one order
        return [microbatches(batch, budget, share_prompts, whole_groups)]
    bins = fill(units(batch, budget, share_prompts, whole_groups), budget, multiple=ranks, at_least=at_least)
    bins = sorted(bins, key=lambda b: -b[0])
    dealt: list[list[Ints]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for first in range(0, len(bins), ranks):
        # The heaviest of these goes to the rank that has least so far.
        order = sorted(range(ranks), key=lambda r: loads[r])
        for (load, rows), rank in zip(bins[first : first + ranks], order):
            dealt[rank].append(np.array(sorted(rows), np.int64) if rows else NOTHING)
            loads[rank] += load
    return dealt


def imbalance(batch: Batch, dealt: list[list[Ints]]) -> float:
    """How much longer the heaviest rank's tokens are than the mean's: 0 is perfect."""
    lengths = batch["tokens"].lengths
    loads = [sum(int(lengths[rows].sum()) for rows in own) for own in dealt]
    mean = sum(loads) / len(loads)
    return max(loads) / mean - 1 if mean else 0.0
