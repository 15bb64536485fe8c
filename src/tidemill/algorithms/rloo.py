"""RLOO (Ahmadian et al. 2024, arXiv:2402.14740): each response is compared with the mean of the others of its prompt.

A_i = r_i − mean(r_j, j ≠ i). The response is one action: its ratio is the product of its tokens' ratios, whose gradient
at ratio 1 is REINFORCE's A_i Σ_t ∇ log π_t; the clip matters only when one step makes several updates.
"""

from __future__ import annotations

from tidemill.algorithms.api import TokenBatch
from tidemill.algorithms.grpo import GRPO
from tidemill.algorithms.shared.losses import sequence_log_ratio
from tidemill.imports import torch


class RLOO(GRPO):
    name = "rloo"
    about = "leave-one-out baseline, one ratio per response"
    paper = {"aggregation": "sample_mean", "baseline": "leave_one_out", "advantage_scale": "none"}

    def log_ratio(self, tokens: TokenBatch) -> torch.Tensor:
        return sequence_log_ratio(tokens, per_token=False)
