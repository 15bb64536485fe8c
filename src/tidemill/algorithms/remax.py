"""ReMax (Li et al. 2024, arXiv:2310.10505): REINFORCE whose baseline is the reward of the greedy response.

Each group has one row decoded greedily (the column `greedy` is 1); it is compared with and not learned from.
Loss per response −A_i Σ_t log π_t, with A_i = r_i − r_greedy; the ratio makes it exact for stale samples.
"""

from __future__ import annotations

import numpy as np

from tidemill.algorithms.api import Kept
from tidemill.algorithms.grpo import GRPO
from tidemill.algorithms.shared import selection, tables
from tidemill.algorithms.shared.advantages import group_index
from tidemill.algorithms.shared.shaping import sample_rewards
from tidemill.batch import GROUP, Batch, Column
from tidemill.graph import Graph
from tidemill.recipe.config import Config


class ReMax(GRPO):
    name = "remax"
    about = "REINFORCE with the greedy response's reward as baseline"
    paper = {"aggregation": "constant", "constant_length": 1, "advantage_scale": "none"}
    compares_samples = False
    credits_turns = False
    greedy_rows = 1

    def graph(self, config: Config) -> Graph:
        stages = (
            tables.rollout(config, "greedy"),
            tables.reward(config),
            *tables.policy_logprobs(config),
            tables.advantage(config, "greedy"),
            tables.learn(config),
        )
        return Graph(self.name, (*tables.SOURCE, "greedy"), stages)

    def advantages(self, batch: Batch, config: Config) -> Batch:
        rewards = sample_rewards(batch, config)
        index, counts = group_index(batch.values(GROUP))
        greedy = batch.values("greedy") != 0
        found = np.bincount(index[greedy], minlength=len(counts))
        baseline = np.bincount(index[greedy], weights=rewards[greedy], minlength=len(counts)) / np.maximum(found, 1)
        advantages = np.where(greedy, 0.0, rewards - baseline[index])
        return selection.with_marks(batch, Column(advantages.astype(np.float32)), config)

    def keep(self, batch: Batch, config: Config) -> Kept:
        return np.asarray(selection.keep_of(batch, config) & (batch.values("greedy") == 0), np.bool_)
