"""On-policy distillation: the policy's own responses, every token rewarded by the teacher (reverse KL).

A_t = log π_teacher − log π_old at the sampled token, detached: the one-sample estimate of −KL(π ‖ teacher), with no
discount, so every token is a lesson (Agarwal et al. 2024, arXiv:2306.13649; Gu et al. 2024). Rewards are only measured.
With `kl.place: reward` a token pays for its divergence from the reference here.
`algorithm.teacher` names the teacher's folder.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from tidemill.algorithms import policy, tables
from tidemill.algorithms.api import Algorithm, Kept, Stats, TokenBatch
from tidemill.algorithms.shaping import token_kl
from tidemill.batch import GROUP, LENGTH, Batch, Column
from tidemill.graph import Graph, Stage
from tidemill.recipe.config import Config


class Distill(Algorithm):
    name = "distill"
    about = "on-policy distillation: a teacher scores every token the policy makes"

    def graph(self, config: Config) -> Graph:
        reads = (GROUP, "tokens", "prompt_length", LENGTH)
        stages = (
            tables.rollout(config),
            tables.reward(config),
            *tables.policy_logprobs(config),
            Stage("teacher", "teacher", reads, ("teacher_logprobs",)),
            tables.advantage(config, "teacher_logprobs", tables.old_column(config)),
            tables.learn(config),
        )
        return Graph(self.name, tables.SOURCE, stages)

    def advantages(self, batch: Batch, config: Config) -> Batch:
        gap = batch.values("teacher_logprobs").astype(np.float64) - batch.values(tables.old_column(config))
        divergence = token_kl(batch, config)
        gap = gap if divergence is None else gap - config.algorithm.kl.coef * divergence
        values = np.where(batch.values("mask") != 0, gap, 0.0).astype(np.float32)
        return policy.with_marks(batch, Column(values, batch["mask"].offsets), config)

    def keep(self, batch: Batch, config: Config) -> Kept:
        return policy.whole_of(batch, config)

    def wants_whole_step(self, config: Config) -> bool:
        return config.algorithm.covariance.mode != "none"

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[Tensor, Stats]:
        return policy.clipped_loss(tokens, config)
