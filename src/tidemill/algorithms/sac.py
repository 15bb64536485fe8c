"""SAC (Haarnoja et al. 2018, arXiv:1812.05905): real-valued actions, two critics, entropy as part of the reward.

Samples stay in the dock and are learned from many times. With y = r + γ (min Q'(s', a') − α log π(a'|s')), a' drawn now
(nothing after the end of an episode, but what came next where it was cut off):

    critics ½ Σ (Q_i(s, a) − y)²      policy α log π(a|s) − min Q(s, a), a drawn now      α: −log α (log π + H)

H is `replay.entropy`, minus the number of dimensions if not given.
"""

from __future__ import annotations

from tidemill.algorithms.api import Algorithm, Stats, TokenBatch
from tidemill.algorithms.shared import steps
from tidemill.algorithms.shared.losses import mean_stat
from tidemill.graph import Graph
from tidemill.imports import torch
from tidemill.recipe.config import Config


class SAC(Algorithm):
    name = "sac"
    about = "replayed samples, two critics of actions, entropy as part of the reward"
    paper = {"aggregation": "token_mean", "critic": {"gamma": 0.99}}
    own_settings = ("replay",)
    policies = ("network",)
    judges = "actions"
    is_replayed = True

    def unused(self, config: Config) -> dict[str, str]:
        return steps.unused_by_critics()

    def graph(self, config: Config) -> Graph:
        return steps.replayed(self.name, config)

    def explores(self, config: Config, decisions: int) -> float:
        return float(decisions < config.algorithm.replay.begin)

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[torch.Tensor, Stats]:
        own = tokens.columns
        wanted = steps.targets(tokens, config)
        critics = 0.5 * ((own["q1"] - wanted).square() + (own["q2"] - wanted).square())
        log_alpha, surprise = own["log_alpha"], tokens.logprobs
        policy = log_alpha.exp().detach() * surprise - own["q_new"]
        aim = steps.entropy_aim(config)
        temperature = -log_alpha * (surprise.detach() + aim)
        stats: Stats = {
            "critic_loss": mean_stat(critics, tokens),
            "policy_loss": mean_stat(policy, tokens),
            "value_mean": mean_stat(own["q1"], tokens),
            "entropy": mean_stat(-surprise, tokens),
            "alpha": mean_stat(log_alpha.exp(), tokens),
        }
        return tokens.weighted(critics + policy + temperature), stats
