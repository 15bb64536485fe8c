"""Learning a value model: a critic of PPO, or a reward model. On the actor's mesh, or on one of its own over the same
ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.algorithms.api import Algorithm, Kept, Stats
from tidemill.algorithms.ppo import explained_variance
from tidemill.batch import Batch, Column
from tidemill.learn.checkpoint.stored import StoredSource
from tidemill.learn.engine import Learner
from tidemill.learn.forward import Scores
from tidemill.learn.model import ALONE
from tidemill.learn.parallel.mesh import Meshes
from tidemill.learn.rows.packing import PackedBatch
from tidemill.learn.rows.tokens import token_batch
from tidemill.learn.values.model import ValueModel
from tidemill.recipe.config import Config, Mixture

SUMS = ("return_square", "value_error_mean", "value_error_square", "value_tokens")  # only to work others out


class ValueLearner(Learner):
    """Learns a value model with `value_loss`, or with `loss` where the value model is all there is to learn. What a
    policy gives as log-probabilities, this gives as values."""

    def __init__(
        self,
        model: ValueModel,
        config: Config,
        algorithm: Algorithm,
        updates: int,
        meshes: Meshes = ALONE,
        source: StoredSource | None = None,
        device: torch.device | None = None,
    ) -> None:
        changes: dict[str, Any] = {}
        if config.algorithm.critic.lr is not None:
            changes["lr"] = config.algorithm.critic.lr
        if model.shares_trunk:  # the policy's learner has the trunk's settings
            changes |= {"lora_rank": 0, "recompute": "none", "compile": "off", "fp8": "none", "offload": "none"}
            changes["moe"] = Mixture()
        if not algorithm.learns_values:  # nobody evaluates a critic: it has no running mean
            changes["ema"] = 0.0
        config = config.model_copy(update={"learn": config.learn.model_copy(update=changes)})
        head = {f"head.{name}": torch.zeros(p.shape) for name, p in model.head.named_parameters()}
        updates = value_updates(algorithm, config, updates)
        super().__init__(model, config, algorithm, updates, meshes, source, device, head)

    def _teaches(self, batch: Batch) -> Kept:
        return np.ones(batch.rows, np.bool_)  # a value of no advantage is still a value to learn

    def _loss_of(self, part: Batch, packed: PackedBatch, scores: Scores) -> tuple[Tensor, Stats]:
        new = scores[0]
        tokens = token_batch(part, packed, (torch.zeros_like(new), torch.zeros_like(new)), new)
        learn = self.algorithm.loss if self.algorithm.learns_values else self.algorithm.value_loss
        return learn(tokens, self.config)

    def update(self) -> dict[str, float]:
        return value_metrics(super().update())

    def values(self, batch: Batch) -> Column:
        """The value before each response token, as a jagged column."""
        return self.logprobs(batch)


def critic_passes(config: Config) -> int:
    return config.algorithm.critic.passes or config.train.passes_per_step


def value_updates(algorithm: Algorithm, config: Config, updates: int) -> int:
    """Of the whole run, where the policy makes `updates`: a critic may learn more often from each sample."""
    return updates // config.train.passes_per_step * critic_passes(config) if algorithm.has_critic else updates


def value_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """An update's metrics with what its sums come to, in their place."""
    if "return_square" not in metrics:
        return metrics
    spread = max(0.0, metrics["return_square"] - metrics["return_mean"] ** 2) ** 0.5
    kept = {name: value for name, value in metrics.items() if name not in SUMS}
    return {**kept, "explained_variance": explained_variance(metrics), "return_std": spread}
