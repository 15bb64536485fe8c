"""On-policy distillation: the policy's own responses, every token rewarded by the teacher (reverse KL).

A_t = log π_teacher − log π_old at the sampled token, detached: the one-sample estimate of −KL(π ‖ teacher), with no
discount, so every token is a lesson (Agarwal et al. 2024, arXiv:2306.13649; Gu et al. 2024). Rewards are only measured.
With `kl.place: reward` a token pays for its divergence from the reference here.
`algorithm.teacher` names the teacher's folder.
"""

from __future__ import annotations

import numpy as np

from tidemill.algorithms.api import Kept
from tidemill.algorithms.grpo import GRPO
from tidemill.algorithms.shared import selection, tables
from tidemill.algorithms.shared.shaping import token_kl
from tidemill.batch import GROUP, LENGTH, Batch, Column
from tidemill.graph import Graph, Stage
from tidemill.recipe.config import Config


class Distill(GRPO):
    name = "distill"
    about = "on-policy distillation: a teacher scores every token the policy makes"
    paper = {"aggregation": "token_mean"}
    compares_samples = False
    own_settings = ("teacher",)

    def unused(self, config: Config) -> dict[str, str]:
        taught = "takes every token's advantage from the teacher"
        found = dict.fromkeys(("baseline", "advantage_scale", "std_bias", "std_eps", "group_of_one"), taught)
        measured = "learns from the teacher: rewards are only measured"
        return found | dict.fromkeys(("dynamic_sampling", "overlong.buffer"), measured)

    def graph(self, config: Config) -> Graph:
        reads = (GROUP, "tokens", "prompt_length", LENGTH, *tables.starts(config))
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
        return selection.with_marks(batch, Column(values, batch["mask"].offsets), config)

    def keep(self, batch: Batch, config: Config) -> Kept:
        return selection.whole_of(batch, config)

    def wants_whole_step(self, config: Config) -> bool:
        return config.algorithm.covariance.mode != "none"
