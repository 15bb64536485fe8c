"""Rejection sampling (RAFT, Dong et al. 2023, arXiv:2304.06767): imitate the policy's own best responses.

Of each group the correct responses are kept (or the `keep_best` best of them), the others dropped; loss −log π. With
`dynamic_sampling` new prompts replace groups of which nothing is left.
"""

from __future__ import annotations

import numpy as np

from tidemill.algorithms.api import Algorithm, Kept, Stats, TokenBatch
from tidemill.algorithms.shared import selection, tables
from tidemill.algorithms.shared.advantages import group_index
from tidemill.algorithms.shared.losses import RATIO_SETTINGS, finish
from tidemill.algorithms.shared.shaping import task_rewards
from tidemill.batch import GROUP, ID, Batch, Column
from tidemill.graph import Graph
from tidemill.imports import torch
from tidemill.recipe.config import Config


class Rejection(Algorithm):
    name = "rejection"
    about = "imitates the correct ones of the policy's own responses"
    paper = {"aggregation": "token_mean"}
    own_settings = ("keep_best",)

    def unused(self, config: Config) -> dict[str, str]:
        no_ratio = "imitates responses: its loss is −log π, without a ratio"
        no_advantage = "imitates responses: there are no advantages"
        found = dict.fromkeys(RATIO_SETTINGS, no_ratio)
        found |= dict.fromkeys(("baseline", "advantage_scale", "std_bias", "std_eps", "group_of_one"), no_advantage)
        found |= {"covariance.mode": no_advantage, "kl.place": "keeps what is correct, whatever its reward"}
        if config.algorithm.keep_best is None:
            found["overlong.buffer"] = "keeps every correct response, whatever its reward, without algorithm.keep_best"
        return found

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
        return selection.with_marks(batch, Column(np.ones(batch.rows, np.float32)), config)

    def keep(self, batch: Batch, config: Config) -> Kept:
        correct = (batch.values("correct") != 0) & selection.whole_of(batch, config)
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

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[torch.Tensor, Stats]:
        return finish(-tokens.logprobs, tokens, config.algorithm, {})
