"""What the flow asks of a model that scores and of a learner, wherever they compute."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tidemill.batch import Batch, Column


class Scores(Protocol):
    """Scores samples: a policy, a reference or a teacher with log-probabilities, a critic with values."""

    def logprobs(self, batch: Batch) -> Column:
        """Of every response token, as a jagged column in the batch's order."""

    def held(self) -> list[Tensor]:
        """What it keeps on a device of this process that may leave while rollout has it."""


class Learns(Scores, Protocol):
    """`accumulate` any number of batches, then `update` once."""

    version: int  # updates made

    def accumulate(self, batch: Batch) -> None:
        """Add the gradient of these samples (complete groups) to the update's."""

    def update(self) -> dict[str, float]:
        """One optimizer step from what was accumulated; metrics of the whole update."""
