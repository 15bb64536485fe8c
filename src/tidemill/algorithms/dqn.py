"""DQN (Mnih et al. 2015) with double estimates (van Hasselt et al. 2016, arXiv:1509.06461): a value for every choice.

Samples stay in the dock and are learned from many times. With y = r + γ Q'(s', argmax Q(s', ·)) the loss is Huber's of
Q(s, a) − y. The best choice is taken, but for a share `replay.explore` of random ones, which shrinks.
"""

from __future__ import annotations

from tidemill.algorithms.api import Algorithm, Stats, TokenBatch
from tidemill.algorithms.shared import steps
from tidemill.algorithms.shared.losses import mean_stat
from tidemill.graph import Graph
from tidemill.imports import torch
from tidemill.recipe.config import Config


class DQN(Algorithm):
    name = "dqn"
    about = "replayed samples, a value for every choice"
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
        first, last, over = config.algorithm.replay.explore
        return first + (last - first) * min(1.0, decisions / max(1, over))

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[torch.Tensor, Stats]:
        q, wanted = tokens.columns["q"], steps.targets(tokens, config)
        error = torch.nn.functional.smooth_l1_loss(q, wanted, reduction="none")
        stats: Stats = {"critic_loss": mean_stat(error, tokens), "value_mean": mean_stat(q, tokens)}
        return tokens.weighted(error), stats
