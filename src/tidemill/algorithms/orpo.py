"""ORPO (Hong et al. 2024, arXiv:2403.07691): imitate the chosen response and raise its odds over the rejected one.

With p the geometric mean of a response's token probabilities, odds = p / (1 − p);
loss −mean log π(chosen) − β log σ(log odds(chosen) − log odds(rejected)). No reference.
"""

from __future__ import annotations

from tidemill.algorithms.shared.preference import PairPolicy
from tidemill.imports import torch
from tidemill.recipe.config import Preference


class ORPO(PairPolicy):
    name = "orpo"
    about = "imitates the chosen response and raises its odds, with no reference"
    paper = {"aggregation": "group_mean", "preference": {"beta": 0.1, "sft_coef": 1.0}}

    def pair_loss(self, chosen: torch.Tensor, rejected: torch.Tensor, settings: Preference) -> torch.Tensor:
        odds = log_odds(chosen / settings.beta) - log_odds(rejected / settings.beta)
        return -settings.beta * torch.nn.functional.logsigmoid(odds)


def log_odds(logprob: torch.Tensor) -> torch.Tensor:
    return logprob - log1mexp(logprob)


def log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 − e^x) for x < 0, exact at both ends: near 0 by expm1, far below by log1p."""
    x = x.clamp(max=-1e-7)
    near = x > -0.6931471805599453
    return torch.where(
        near, torch.log(-torch.expm1(torch.where(near, x, -1.0))), torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    )
