"""One decision deals an update's samples out over ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.learn.parallel.products import samples
from tidemill.batch import Batch
from tidemill.learn.rows.packing import Ints, shares


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(1, 8),
    budget=st.integers(20, 200),
    share=st.booleans(),
    groups=st.integers(1, 12),
    seed=st.integers(0, 100),
)
def test_every_sample_is_dealt_once_and_all_ranks_have_as_many_microbatches(
    ranks: int, budget: int, share: bool, groups: int, seed: int
) -> None:
    batch = samples(seed, groups=groups)
    dealt = shares(batch, ranks, budget, share)
    assert sorted(np.concatenate([rows for own in dealt for rows in own]).tolist()) == list(range(batch.rows))
    assert len({len(own) for own in dealt}) == 1


def imbalance(batch: Batch, dealt: list[list[Ints]]) -> float:
    """How much longer the heaviest rank's tokens are than the mean's: 0 is perfect."""
    lengths = batch["tokens"].lengths
    loads = [sum(int(lengths[rows].sum()) for rows in own) for own in dealt]
    mean = sum(loads) / len(loads)
    return max(loads) / mean - 1 if mean else 0.0


def test_loads_are_even_when_there_is_enough_to_deal() -> None:
    batch = samples(groups=64, each=8, longest=40)
    for ranks in (2, 4, 8):
        assert imbalance(batch, shares(batch, ranks, 512, False)) < 0.02


def test_groups_of_pairs_are_not_parted() -> None:
    batch = samples(groups=9, each=2)
    for own in shares(batch, 4, 10, True, whole_groups=True):
        for rows in own:
            kept = batch.gather(rows).values("group")
            assert all((kept == g).sum() == 2 for g in kept)


@pytest.mark.parametrize("ranks", [3, 8])
def test_ranks_without_samples_get_fillers(ranks: int) -> None:
    dealt = shares(samples(groups=1, each=2), ranks, 1000, False)
    assert sum(len(rows) for own in dealt for rows in own) == 2
    assert all(len(own) == 1 for own in dealt)
