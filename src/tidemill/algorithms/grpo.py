"""GRPO (Shao et al. 2024, arXiv:2402.03300): a group's own rewards are its baseline, PPO's clipped ratio is its loss.

A_i = (r_i − mean(r)) / std(r), the same for every token of the response; loss per token −min(ρA, clip(ρ)A) + β·KL,
averaged over each response and then over responses. Most other algorithms say only what they change in this file.
"""

from __future__ import annotations

from tidemill.algorithms.api import Algorithm, Kept, Stats, TokenBatch
from tidemill.algorithms.shared import credit, selection, tables
from tidemill.algorithms.shared.losses import clipped_surrogate, finish, held_back, log_ratio_of, ratio_stats
from tidemill.batch import Batch
from tidemill.graph import Graph
from tidemill.imports import torch
from tidemill.recipe.config import Config


class GRPO(Algorithm):
    name = "grpo"
    about = "group-relative advantages, clipped ratio per token"
    paper = {"aggregation": "sample_mean"}
    compares_samples = True
    credits_turns = True

    def graph(self, config: Config) -> Graph:
        stages = (
            tables.rollout(config),
            tables.reward(config),
            *tables.policy_logprobs(config),
            tables.advantage(config),
            tables.learn(config),
        )
        return Graph(self.name, tables.SOURCE, stages)

    def advantages(self, batch: Batch, config: Config) -> Batch:
        return selection.with_marks(batch, credit.compared(batch, config), config)

    def wants_whole_step(self, config: Config) -> bool:
        return config.algorithm.advantage_scale == "batch_std" or config.algorithm.covariance.mode != "none"

    def keep(self, batch: Batch, config: Config) -> Kept:
        return selection.keep_of(batch, config)

    def teaches(self, batch: Batch, config: Config) -> Kept:
        return selection.teaches_of(batch, config)

    def log_ratio(self, tokens: TokenBatch) -> torch.Tensor:
        """log ρ at each token."""
        return log_ratio_of(tokens)

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[torch.Tensor, Stats]:
        settings, log_ratio = config.algorithm, self.log_ratio(tokens)
        per_token = -clipped_surrogate(log_ratio, tokens.made(tokens.advantages), settings)
        per_token = held_back(per_token, log_ratio, tokens, settings)
        return finish(per_token, tokens, settings, ratio_stats(log_ratio, tokens, settings))
