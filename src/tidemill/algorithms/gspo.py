"""GSPO (Zheng et al. 2025, arXiv:2507.18071): one ratio per response, the geometric mean of its tokens' ratios.

s_i = exp(1/|y_i| Σ_t log ρ_t); objective min(s_i A_i, clip(s_i) A_i), averaged over responses. Clips are far smaller
than GRPO's, for s_i stays near 1.
"""

from __future__ import annotations

from torch import Tensor

from tidemill.algorithms import policy
from tidemill.algorithms.api import Stats, TokenBatch
from tidemill.algorithms.losses import clipped_surrogate, finish, held_back, ratio_stats, sequence_log_ratio
from tidemill.config import Config


class GSPO(policy.GroupPolicy):
    name = "gspo"
    about = "group advantages, one length-normalised ratio per response"

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[Tensor, Stats]:
        settings = config.algorithm
        log_ratio = sequence_log_ratio(tokens, per_token=True)
        # The same objective at each token of a response: with sample_mean they add up to the response's own.
        per_token = held_back(-clipped_surrogate(log_ratio, tokens.advantages, settings), log_ratio, tokens, settings)
        return finish(per_token, tokens, settings, ratio_stats(log_ratio, tokens, settings))
