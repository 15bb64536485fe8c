"""What the flow asks of a learner, wherever it computes."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tidemill.batch import Batch, Column


@runtime_checkable
class GivesLogprobs(Protocol):
    """Gives log-probabilities by itself; a plain model is scored by `learn.engine.score`."""

    def logprobs(self, batch: Batch) -> Column: ...


class Values(Protocol):
    """A critic."""

    def values(self, batch: Batch) -> Column:
        """The value before each response token, as a jagged column."""


class LearnEngine(Protocol):
    """`accumulate` any number of batches, then `update` once."""

    version: int  # updates made

    def accumulate(self, batch: Batch) -> None:
        """Add the gradient of these samples (complete groups) to the update's."""

    def update(self) -> dict[str, float]:
        """One optimizer step from what was accumulated; metrics of the whole update."""
