"""CISPO (MiniMax 2025, arXiv:2506.13585): the importance weight is clipped and detached, no token loses its gradient.

loss per token −sg(clip(ρ, 1 − ε_low, 1 + ε_high)) · A · log π.
"""

from __future__ import annotations

from tidemill.algorithms.api import Stats, TokenBatch
from tidemill.algorithms.grpo import GRPO
from tidemill.algorithms.shared.losses import finish, held_back, log_ratio_of, ratio_stats
from tidemill.imports import torch
from tidemill.recipe.config import Config


class CISPO(GRPO):
    name = "cispo"
    about = "group advantages, REINFORCE with a clipped and detached importance weight"
    paper = {"aggregation": "token_mean", "clip_low": 1.0, "clip_high": 4.0}

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[torch.Tensor, Stats]:
        settings = config.algorithm
        log_ratio = log_ratio_of(tokens)
        weight = log_ratio.detach().exp().clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
        per_token = held_back(
            -weight * tokens.made(tokens.advantages) * tokens.made(tokens.logprobs), log_ratio, tokens, settings
        )
        return finish(per_token, tokens, settings, ratio_stats(log_ratio, tokens, settings))
