"""REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): no critic and no groups; advantages normalised over the whole step.

Token rewards (−β·KL at each token, the task's reward at the last) are summed from each token on, then brought to mean 0
and standard deviation 1 over all tokens of the step.
"""

from __future__ import annotations

import numpy as np

from tidemill.algorithms.grpo import GRPO
from tidemill.algorithms.shared import credit, selection
from tidemill.algorithms.shared.advantages import Floats, rewards_to_go, whitened
from tidemill.batch import Batch, Column
from tidemill.recipe.config import Config


class ReinforcePP(GRPO):
    name = "reinforce_pp"
    about = "REINFORCE with token rewards, normalised over the whole step, clipped ratio"
    paper = {"aggregation": "token_mean", "baseline": "none", "advantage_scale": "batch_std"}
    compares_samples = False

    def advantages(self, batch: Batch, config: Config) -> Batch:
        mask = batch["mask"]
        assert mask.offsets is not None
        rewards = credit.token_rewards(batch, config)
        to_go = np.zeros_like(rewards)
        for start, end in zip(mask.offsets[:-1], mask.offsets[1:]):
            to_go[start:end] = rewards_to_go(rewards[start:end])
        return normalised(batch, to_go, config)

    def wants_whole_step(self, config: Config) -> bool:
        return True


def normalised(batch: Batch, per_token: Floats, config: Config) -> Batch:
    """Over the step's tokens, with the recipe's epsilon; `advantage_scale: none` leaves them as they are."""
    if config.algorithm.advantage_scale == "none":
        values = np.where(batch.values("mask") != 0, per_token, 0.0)
    else:
        values = whitened(per_token, batch.values("mask"), config.algorithm.std_eps)
    return selection.with_marks(batch, Column(values.astype(np.float32), batch["mask"].offsets), config)
