"""REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): no critic and no groups; advantages normalised over the whole step.

Token rewards (−β·KL at each token, the task's reward at the last) are summed from each token on, then brought to mean 0
and standard deviation 1 over all tokens of the step. The baseline form first takes the group's mean from the reward.
"""

from __future__ import annotations

import numpy as np

from tidemill.algorithms import policy
from tidemill.algorithms.advantages import group_advantages, rewards_to_go, whitened
from tidemill.algorithms.shaping import sample_rewards, token_rewards, token_rows
from tidemill.batch import GROUP, Batch, Column
from tidemill.recipe.config import Config


class ReinforcePP(policy.GroupPolicy):
    name = "reinforce_pp"
    about = "REINFORCE with token rewards, normalised over the whole step, clipped ratio"

    def advantages(self, batch: Batch, config: Config) -> Batch:
        mask = batch["mask"]
        assert mask.offsets is not None
        rewards = token_rewards(batch, config)
        to_go = np.zeros_like(rewards)
        for start, end in zip(mask.offsets[:-1], mask.offsets[1:]):
            to_go[start:end] = rewards_to_go(rewards[start:end])
        return normalised(batch, to_go, config)

    def wants_whole_step(self, config: Config) -> bool:
        return True


class ReinforcePPBaseline(ReinforcePP):
    name = "reinforce_pp_baseline"
    about = "reward less its group's mean, normalised over the whole step, clipped ratio"

    def advantages(self, batch: Batch, config: Config) -> Batch:
        settings = config.algorithm
        centred = group_advantages(
            sample_rewards(batch, config),
            batch.values(GROUP),
            baseline=settings.baseline,
            scale="none",
            group_of_one=settings.group_of_one,
        )
        return normalised(batch, centred.astype(np.float64)[token_rows(batch)], config)


def normalised(batch: Batch, per_token: policy.Floats, config: Config) -> Batch:
    """Over the step's tokens, with the recipe's epsilon; `advantage_scale: none` leaves them as they are."""
    if config.algorithm.advantage_scale == "none":
        values = np.where(batch.values("mask") != 0, per_token, 0.0)
    else:
        values = whitened(per_token, batch.values("mask"), config.algorithm.std_eps)
    return policy.with_marks(batch, Column(values.astype(np.float32), batch["mask"].offsets), config)
