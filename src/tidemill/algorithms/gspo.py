"""GSPO (Zheng et al. 2025, arXiv:2507.18071): one ratio per response, the geometric mean of its tokens' ratios.

s_i = exp(1/|y_i| Σ_t log ρ_t); objective min(s_i A_i, clip(s_i) A_i), averaged over responses. Clips are far smaller
than GRPO's, for s_i stays near 1.
"""

from __future__ import annotations

from torch import Tensor

from tidemill.algorithms import policy
from tidemill.algorithms.api import Stats, TokenBatch
from tidemill.recipe.config import Config


class GSPO(policy.GroupPolicy):
    name = "gspo"
    about = "group advantages, one length-normalised ratio per response"

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[Tensor, Stats]:
        return policy.sequence_loss(tokens, config, per_token=True)
