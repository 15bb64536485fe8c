"""GSPO (Zheng et al. 2025, arXiv:2507.18071): one ratio per response, the geometric mean of its tokens' ratios.

s_i = exp(1/|y_i| Σ_t log ρ_t); objective min(s_i A_i, clip(s_i) A_i), averaged over responses: it stands at each token
of the response, and with sample_mean they add up to it. Clips are far smaller than GRPO's because s_i stays near 1.
"""

from __future__ import annotations

from tidemill.algorithms.api import TokenBatch
from tidemill.algorithms.grpo import GRPO
from tidemill.algorithms.shared.losses import sequence_log_ratio
from tidemill.imports import torch


class GSPO(GRPO):
    name = "gspo"
    about = "group advantages, one length-normalised ratio per response"
    paper = {"aggregation": "sample_mean", "clip_low": 3e-4, "clip_high": 4e-4}

    def log_ratio(self, tokens: TokenBatch) -> torch.Tensor:
        return sequence_log_ratio(tokens, per_token=True)
