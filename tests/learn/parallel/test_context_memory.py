"""Ranks hold a sequence as many times longer than one could with the same memory, and compute one rank's numbers."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.context import measure

from tidemill.cluster.start.ranks import Ranks

SHARE, RANKS = 256, 8
SHAPE = (64, 2)  # width, layers


@pytest.mark.slow
def test_eight_ranks_hold_a_sequence_eight_times_longer(ranks: Ranks) -> None:
    share = ranks.call(measure, {}, SHARE, *SHAPE, 1, on=1)[0]
    whole = ranks.call(measure, {}, RANKS * SHARE, *SHAPE, 1, on=1)[0]
    assert whole["activation_bytes"] > 4.5 * share["activation_bytes"]  # memory grows with the tokens
    for form in ("ulysses", "ring"):
        found = ranks.call(measure, {"cp": RANKS, "cp_form": form}, RANKS * SHARE, *SHAPE, 1, on=RANKS)
        worst = max(one["activation_bytes"] for one in found)
        # More than a share: key heads are fewer than ranks and are copied; a tile of scores or a block under way lies
        # beside them. Far less than the whole, which takes five shares and more.
        assert worst < 1.5 * share["activation_bytes"], form
        np.testing.assert_allclose(found[0]["after"], whole["after"], atol=1e-5)
        assert found[0]["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5)
