"""A run whose workers are killed at random ends with every sample used once."""

from __future__ import annotations

import pytest

from tidemill import bench

pytest.importorskip("msgspec")


@pytest.mark.slow
def test_a_short_soak_loses_and_doubles_nothing() -> None:
    found = bench.run("faults", {"minutes": 0.2, "every_s": 2.5})
    assert found["steps"] == found["steps_asked"] >= 20
    assert found["kills_total"] >= 1
    assert (found["lost"], found["doubled"]) == (0, 0)
    assert found["largest_difference"] < 1e-3
    assert found["accuracy"] == pytest.approx(found["accuracy_undisturbed"], abs=0.03)
