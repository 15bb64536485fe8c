"""Arithmetic that losses share: clipped ratios, importance weights, and the statistics each loss reports."""

from __future__ import annotations

import torch
from torch import Tensor

from tidemill.algorithms import kl
from tidemill.algorithms.api import Stat, Stats, TokenBatch
from tidemill.config import Algorithm


def log_ratio_of(tokens: TokenBatch) -> Tensor:
    """log π − log π_old; 0 where the model made nothing, so that no overflow there can meet a weight of 0."""
    return (tokens.logprobs - tokens.old_logprobs) * tokens.mask


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, settings: Algorithm) -> Tensor:
    """PPO's objective (Schulman et al. 2017, eq. 7) per token; dual clip bounds it by c·A where A < 0."""
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if settings.dual_clip is not None:
        bounded = torch.maximum(objective, settings.dual_clip * advantages)
        objective = torch.where(advantages < 0, bounded, objective)
    return objective


def rollout_correction(tokens: TokenBatch, settings: Algorithm) -> Tensor | None:
    """Truncated importance weights min(π_old / π_rollout, cap) for recomputed old log-probabilities; no gradient."""
    if settings.rollout_correction == "none" or tokens.rollout_logprobs is None:
        return None
    gap = (tokens.old_logprobs - tokens.rollout_logprobs).detach() * tokens.mask
    if settings.rollout_correction == "sequence":
        gap = row_sum(gap, tokens)[tokens.row]
    return gap.exp().clamp(max=settings.rollout_correction_cap)


def finish(per_token: Tensor, tokens: TokenBatch, settings: Algorithm, stats: Stats) -> tuple[Tensor, Stats]:
    """The terms every policy loss shares (KL, entropy bonus), and the weighted sum."""
    stats["policy_loss"] = Stat((tokens.weights * per_token).detach().sum(), tokens.weights.sum())
    if tokens.ref_logprobs is not None:
        divergence = kl.estimate(tokens.logprobs * tokens.mask, tokens.ref_logprobs * tokens.mask, settings.kl)
        stats["kl"] = mean_stat(divergence, tokens)
        if settings.kl.place == "loss":
            per_token = per_token + settings.kl.coef * divergence
    if tokens.entropy is not None:
        stats["entropy"] = mean_stat(tokens.entropy, tokens)
        if settings.entropy_coef:
            per_token = per_token - settings.entropy_coef * tokens.entropy
    return (tokens.weights * per_token).sum(), stats


def ratio_stats(log_ratio: Tensor, tokens: TokenBatch, settings: Algorithm) -> Stats:
    """How far the policy has moved from the one that made the samples, and how much of it the clip stopped."""
    with torch.no_grad():
        ratio = log_ratio.exp()
        low = (ratio < 1.0 - settings.clip_low) & (tokens.advantages < 0)
        high = (ratio > 1.0 + settings.clip_high) & (tokens.advantages > 0)
        stats: Stats = {
            "ratio_mean": mean_stat(ratio, tokens),
            "clip_share_low": mean_stat(low.to(ratio.dtype), tokens),
            "clip_share_high": mean_stat(high.to(ratio.dtype), tokens),
            "old_kl": mean_stat(torch.expm1(log_ratio) - log_ratio, tokens),  # k3 of KL(old ‖ new)
        }
        if len(ratio):
            stats["ratio_max"] = Stat(ratio.max(), reduce="max")
            stats["ratio_min"] = Stat(ratio.min(), reduce="min")
    return stats


def mean_stat(values: Tensor, tokens: TokenBatch) -> Stat:
    """A mean over the tokens the model made."""
    return Stat((values.detach() * tokens.mask).sum(), tokens.mask.sum())


def row_sum(values: Tensor, tokens: TokenBatch) -> Tensor:
    """(tokens,) → (rows,)"""
    return torch.zeros(tokens.rows, dtype=values.dtype, device=values.device).index_add(0, tokens.row, values)
