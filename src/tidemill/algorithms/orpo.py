"""ORPO (Hong et al. 2024, arXiv:2403.07691): imitate the chosen response and raise its odds over the rejected one.

With p the geometric mean of a response's token probabilities, odds = p / (1 − p);
loss −mean log π(chosen) − β log σ(log odds(chosen) − log odds(rejected)). No reference.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.algorithms import preference
from tidemill.algorithms.api import Algorithm, Stats, TokenBatch
from tidemill.batch import Batch
from tidemill.config import Config
from tidemill.graph import Graph


class ORPO(Algorithm):
    name = "orpo"
    about = "imitates the chosen response and raises its odds, with no reference"
    food = "pairs"

    def graph(self, config: Config) -> Graph:
        return preference.graph(self.name, needs_reference=False)

    def advantages(self, batch: Batch, config: Config) -> Batch:
        return Batch({})

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[Tensor, Stats]:
        settings = config.algorithm.preference
        pairs = preference.pairs_of(tokens)
        logprobs = preference.row_means(tokens.logprobs, tokens)
        log_odds = logprobs - log1mexp(logprobs)
        h = log_odds[pairs.chosen] - log_odds[pairs.rejected]
        per_pair = -settings.sft_coef * logprobs[pairs.chosen] - settings.beta * F.logsigmoid(h)
        reward = settings.beta * logprobs
        stats = preference.pair_stats(reward[pairs.chosen], reward[pairs.rejected], logprobs, pairs)
        return (pairs.weight * per_pair).sum(), stats


def log1mexp(x: Tensor) -> Tensor:
    """log(1 − e^x) for x < 0, exact at both ends: near 0 by expm1, far below by log1p."""
    x = x.clamp(max=-1e-7)
    near = x > -0.6931471805599453
    return torch.where(
        near, torch.log(-torch.expm1(torch.where(near, x, -1.0))), torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    )
