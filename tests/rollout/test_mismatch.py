from __future__ import annotations

import math

import numpy as np
import pytest

from tidemill.rollout.mismatch import measure


def test_gap_and_ratio_are_those_worked_out_by_hand() -> None:
    met = measure(np.array([-1.0, -2.0]), np.array([-1.0, -1.5]))
    assert met.mean == pytest.approx(0.25) and met.max == pytest.approx(0.5)
    assert met.ratio_mean == pytest.approx((1 + math.exp(0.5)) / 2) and met.ratio_max == pytest.approx(math.exp(0.5))
    assert met.ratio_far == 0.5 and met.tokens == 2
    assert met.metrics("native")["mismatch/native/max"] == pytest.approx(0.5)


def test_a_missing_number_is_not_agreement() -> None:
    assert measure(np.array([-1.0, np.nan]), np.array([-1.0, -1.0])).max == math.inf


def test_nothing_sampled_is_agreement() -> None:
    assert measure(np.zeros(0), np.zeros(0)).ratio_mean == 1.0


def test_sides_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="one log-probability per token"):
        measure(np.zeros(2), np.zeros(3))
