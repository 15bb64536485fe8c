"""GRPO (Shao et al. 2024, arXiv:2402.03300): a group's own rewards are its baseline, PPO's clipped ratio is its loss.

A_i = (r_i − mean(r)) / std(r), the same for every token of the response; loss per token −min(ρA, clip(ρ)A) + β·KL.
"""

from __future__ import annotations

from torch import Tensor

from tidemill.algorithms import tables
from tidemill.algorithms.advantages import group_advantages
from tidemill.algorithms.api import Stats, TokenBatch
from tidemill.algorithms.losses import clipped_surrogate, finish, log_ratio_of, ratio_stats, rollout_correction
from tidemill.algorithms.shaping import sample_rewards
from tidemill.batch import Batch
from tidemill.config import Config
from tidemill.graph import Graph


class GRPO:
    name = "grpo"
    about = "group-relative advantages, clipped ratio per token"

    def graph(self, config: Config) -> Graph:
        return Graph(
            self.name,
            tables.SOURCE,
            (
                tables.rollout(),
                tables.reward(),
                *tables.policy_logprobs(config),
                tables.advantage(config),
                tables.learn(config),
            ),
        )

    def advantages(self, batch: Batch, config: Config) -> Batch:
        settings = config.algorithm
        return Batch(
            {
                "advantages": group_advantages(
                    sample_rewards(batch, config),
                    batch.values("group"),
                    baseline=settings.baseline,
                    scale=settings.advantage_scale,
                    std_bias=settings.std_bias,
                    std_eps=settings.std_eps,
                    group_of_one=settings.group_of_one,
                )
            }
        )

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[Tensor, Stats]:
        settings = config.algorithm
        log_ratio = log_ratio_of(tokens)
        per_token = -clipped_surrogate(log_ratio, tokens.advantages, settings)
        correction = rollout_correction(tokens, settings)
        if correction is not None:
            per_token = per_token * correction
        return finish(per_token, tokens, settings, ratio_stats(log_ratio, tokens, settings))
