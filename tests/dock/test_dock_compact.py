"""Arrays come out of the wire as they went in, however they were packed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tidemill.dock.net.compact import pack, unpack


@given(arrays.arrays(st.sampled_from([np.int64, np.int32]), st.integers(0, 40), elements=st.integers(-3, 3)))
def test_any_array_comes_back(array):
    assert np.array_equal(unpack(pack(array), array.dtype, len(array)), array)


@given(st.integers(-(2**40), 2**40), st.integers(0, 2000))
def test_ranges_and_single_values_come_back_and_are_short(start, n):
    for array in (np.arange(start, start + n), np.full(n, start)):
        packed = pack(array)
        assert np.array_equal(unpack(packed, np.int64, n), array)
        assert len(packed) <= 33


def test_missing_floats_and_wrong_lengths():
    scores = np.full(9, np.nan, np.float32)
    assert np.isnan(unpack(pack(scores), np.float32, 9)).all()
    with pytest.raises(ValueError, match="for 8 rows"):
        unpack(pack(np.array([5, 3, 1, 2, 9])), np.int64, 8)
    with pytest.raises(ValueError, match="unknown form"):
        unpack(b"x12345678", np.int64, 1)
