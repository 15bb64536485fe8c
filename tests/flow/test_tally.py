"""A step's metrics, of all that its updates and workers counted."""

from __future__ import annotations

from tidemill.flow.tally import Tally, together


def test_what_counts_from_the_runs_beginning_is_not_averaged_over_a_steps_updates() -> None:
    tally = Tally()
    for skipped in (4.0, 4.0, 5.0, 5.0):
        tally.update({"skipped_updates": skipped, "loss": skipped, "ratio_max": skipped})
    metrics = together([tally.drain()])
    assert (metrics["skipped_updates"], metrics["loss"], metrics["ratio_max"]) == (5.0, 4.5, 5.0)
