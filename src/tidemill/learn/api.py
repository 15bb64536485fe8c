"""What the flow asks of a model that scores and of a learner, wherever they compute."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from tidemill.batch import Batch, Column
from tidemill.recipe.config import Config


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


class LearnEngine(Learns, Protocol):
    """The policy's learner: `learn.engine.Learner` in this process, or a stand-in for its ranks."""

    config: Config
    show: Any  # told gradients and weights of every update, for dumps

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, the weights that rollout reads are their running mean, where one is kept."""

    def publish(self) -> None:
        """Let rollout in this process read the weights as they are now."""

    def save(
        self, folder: Path, step: int, state: Mapping[str, Any], *, keep: int, best: bool = False,
        metric: float | None = None, more: Mapping[str, Tensor] | None = None, critic: Any = None, wait: bool = False,
    ) -> None:  # fmt: skip
        """Write a checkpoint; `more`: tensors that belong to it and are nobody's pieces."""

    def load(self, path: Path, critic: Any = None) -> dict[str, Any]:
        """Take up a checkpoint; gives its state."""

    def settle(self) -> None:
        """Wait until a checkpoint that is under way is on disk."""

    def close(self) -> None: ...
