"""Rejection sampling (RAFT, Dong et al. 2023, arXiv:2304.06767): imitate the policy's own best responses.

Of each group the correct responses are kept (or the `keep_best` best of them), the others dropped; loss −log π. With
`dynamic_sampling` new prompts replace groups of which nothing is left.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from tidemill.algorithms import policy, tables
from tidemill.algorithms.advantages import group_index
from tidemill.algorithms.api import Algorithm, Kept, Stats, TokenBatch
from tidemill.algorithms.losses import finish
from tidemill.algorithms.shaping import task_rewards
from tidemill.batch import GROUP, ID, Batch, Column
from tidemill.graph import Graph
from tidemill.recipe.config import Config


class Rejection(Algorithm):
    name = "rejection"
    about = "imitates the correct ones of the policy's own responses"

    def graph(self, config: Config) -> Graph:
        stages = (
            tables.rollout(config),
            tables.reward(config),
            *tables.policy_logprobs(config),
            tables.advantage(config, "correct", ID),
            tables.learn(config),
        )
        return Graph(self.name, tables.SOURCE, stages)

    def advantages(self, batch: Batch, config: Config) -> Batch:
        return policy.with_marks(batch, Column(np.ones(batch.rows, np.float32)), config)

    def keep(self, batch: Batch, config: Config) -> Kept:
        correct = (batch.values("correct") != 0) & policy.whole_of(batch, config)
        most = config.algorithm.keep_best
        if most is None:
            return np.asarray(correct, np.bool_)
        index, counts = group_index(batch.values(GROUP))
        # The correct ones first, then the best; equal rewards in the order of their ids: nothing depends on arrival.
        order = np.lexsort((batch.values(ID), -task_rewards(batch, config), ~correct, index))
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
        place = np.empty(batch.rows, np.int64)
        place[order] = np.arange(batch.rows) - starts[index[order]]
        return np.asarray(correct & (place < most), np.bool_)

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[Tensor, Stats]:
        return finish(-tokens.logprobs, tokens, config.algorithm, {})
