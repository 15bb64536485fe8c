"""Reward-model training (Bradley and Terry 1952): the value at the last token prefers the chosen response.

Loss −log σ(r_chosen − r_rejected − margin) + c (r_chosen + r_rejected)², the second term keeping rewards around 0.
"""

from __future__ import annotations

from tidemill.algorithms.api import Stats, TokenBatch
from tidemill.algorithms.shared import preference
from tidemill.imports import torch
from tidemill.recipe.config import Config


class RewardModel(preference.PairPolicy):
    name = "reward_model"
    about = "trains a reward model on pairs"
    paper = {"aggregation": "group_mean"}
    learns_values = True

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[torch.Tensor, Stats]:
        settings = config.algorithm.preference
        assert tokens.values is not None, "the reward model's values"
        pairs = preference.pairs_of(tokens)
        reward = tokens.values[last_of_rows(tokens)]
        chosen, rejected = reward[pairs.chosen], reward[pairs.rejected]
        per_pair = -torch.nn.functional.logsigmoid(chosen - rejected - settings.margin)
        per_pair = per_pair + settings.centre_coef * (chosen + rejected).square()
        return (pairs.weight * per_pair).sum(), preference.reward_stats(chosen.detach(), rejected.detach())


def last_of_rows(tokens: TokenBatch) -> torch.Tensor:
    """Index of every row's last token."""
    place = torch.arange(len(tokens.row), device=tokens.row.device)
    return torch.zeros(tokens.rows, dtype=place.dtype, device=place.device).scatter_reduce(
        0, tokens.row, place, "amax", include_self=False
    )
