"""Value models across ranks: a critic, or a reward model. On the actor's mesh, or on one of its own over the same
ranks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tidemill.algorithms.api import Algorithm, Kept, Stats
from tidemill.batch import Batch, Column
from tidemill.learn.critic import ValueModel, of_value, value_metrics, value_updates
from tidemill.learn.engine import Scores, token_batch
from tidemill.learn.packing import PackedBatch
from tidemill.learn.parallel.learner import ParallelLearner
from tidemill.learn.parallel.mesh import Meshes
from tidemill.learn.parallel.stored import StoredSource
from tidemill.recipe.config import Config


class ParallelValueLearner(ParallelLearner):
    """As `learn.critic.ValueLearner`. What a policy gives as log-probabilities, this gives as values."""

    def __init__(
        self,
        model: ValueModel,
        config: Config,
        algorithm: Algorithm,
        updates: int,
        meshes: Meshes,
        source: StoredSource | None = None,
        device: torch.device | None = None,
    ) -> None:
        rate = config.algorithm.critic.lr
        if rate is not None:
            config = config.model_copy(update={"learn": config.learn.model_copy(update={"lr": rate})})
        config = of_value(config, algorithm)
        head = {f"head.{name}": torch.zeros(p.shape) for name, p in model.head.named_parameters()}
        super().__init__(
            model, config, algorithm, value_updates(algorithm, config, updates), meshes, source, device, head
        )

    def _teaches(self, batch: Batch) -> Kept:
        return np.ones(batch.rows, np.bool_)

    def _loss_of(self, part: Batch, packed: PackedBatch, scores: Scores) -> tuple[Tensor, Stats]:
        new = scores[0]
        tokens = token_batch(part, packed, (torch.zeros_like(new), torch.zeros_like(new)), new)
        learn = self.algorithm.loss if self.algorithm.learns_values else self.algorithm.value_loss
        return learn(tokens, self.config)

    def update(self) -> dict[str, float]:
        return value_metrics(super().update())

    def values(self, batch: Batch) -> Column:
        """The value before each response token; every rank gives the same batch and gets all."""
        return self.logprobs(batch)
