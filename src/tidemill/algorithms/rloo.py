"""RLOO (Ahmadian et al. 2024, arXiv:2402.14740): each response is compared with the mean of the others of its prompt.

A_i = r_i − mean(r_j, j ≠ i). The response is one action: its ratio is the product of its tokens' ratios, whose gradient
at ratio 1 is REINFORCE's A_i Σ_t ∇ log π_t; the clip matters only when one step makes several updates.
"""

from __future__ import annotations

from torch import Tensor

from tidemill.algorithms import policy
from tidemill.algorithms.api import Stats, TokenBatch
from tidemill.recipe.config import Config


class RLOO(policy.GroupPolicy):
    name = "rloo"
    about = "leave-one-out baseline, one ratio per response"

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[Tensor, Stats]:
        return policy.sequence_loss(tokens, config, per_token=False)
