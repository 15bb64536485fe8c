"""Arithmetic that losses share: clipped ratios, importance weights, and the statistics each loss reports."""

from __future__ import annotations

from typing import Literal

from tidemill.algorithms.api import Stat, Stats, TokenBatch, segment_sum
from tidemill.algorithms.shared import kl
from tidemill.imports import torch
from tidemill.recipe.config import AlgorithmSettings

RATIO_SETTINGS = ("clip_low", "clip_high", "dual_clip", "ratio_cap")  # of losses with a ratio alone


def log_ratio_of(tokens: TokenBatch) -> torch.Tensor:
    """log π − log π_old; 0 where the model made nothing, so that no overflow there can meet a weight of 0."""
    return tokens.made(tokens.logprobs - tokens.old_logprobs)


def sequence_log_ratio(tokens: TokenBatch, per_token: bool) -> torch.Tensor:
    """The whole response's log ratio at each of its tokens: its sum, or (GSPO) its mean over the response's tokens."""
    total = segment_sum(log_ratio_of(tokens), tokens.row, tokens.rows)
    if per_token:
        total = total / row_lengths(tokens).clamp(min=1.0)
    return total[tokens.row]


def row_lengths(tokens: TokenBatch) -> torch.Tensor:
    """(rows,) tokens the model made."""
    return segment_sum(tokens.mask, tokens.row, tokens.rows)


def clipped_surrogate(log_ratio: torch.Tensor, advantages: torch.Tensor, settings: AlgorithmSettings) -> torch.Tensor:
    """PPO's objective (Schulman et al. 2017, eq. 7) per token, with two optional bounds against huge ratios.

    `dual_clip` c (Ye et al. 2020): at least c·A where A < 0. `ratio_cap` δ: the free ratio counts as at most δ.
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    free = ratio if settings.ratio_cap is None else ratio.clamp(max=settings.ratio_cap)
    objective = torch.minimum(free * advantages, clipped * advantages)
    if settings.dual_clip is not None:
        bounded = torch.maximum(objective, settings.dual_clip * advantages)
        objective = torch.where(advantages < 0, bounded, objective)
    return objective


def rollout_correction(tokens: TokenBatch, settings: AlgorithmSettings) -> torch.Tensor | None:
    """Importance weights w = π_old / π_rollout for recomputed old log-probabilities, per token or per response; no
    gradient. Truncated: min(w, cap). Masked: w inside [floor, cap], else 0.

    With samples of older weights π_old is the proximal policy, the one a step starts from: the clip then bounds how far
    a step goes, and w alone says how far the samples are off (decoupled PPO, Hilton et al. 2022, arXiv:2110.00641).
    """
    if settings.rollout_correction == "none" or tokens.rollout_logprobs is None:
        return None
    gap = tokens.made(tokens.old_logprobs - tokens.rollout_logprobs).detach()
    if settings.rollout_correction == "sequence":
        gap = segment_sum(gap, tokens.row, tokens.rows)[tokens.row]
    weight = gap.exp()
    if settings.rollout_correction_outside == "truncate":
        return weight.clamp(max=settings.rollout_correction_cap)
    is_inside = (weight >= settings.rollout_correction_floor) & (weight <= settings.rollout_correction_cap)
    return torch.where(is_inside, weight, torch.zeros_like(weight))


def held_back(
    per_token: torch.Tensor, log_ratio: torch.Tensor, tokens: TokenBatch, settings: AlgorithmSettings
) -> torch.Tensor:
    """Clip-cov and KL-cov (Cui et al. 2025): marked tokens give no gradient, or pay |log ratio|."""
    marked = tokens.columns.get("held_back")
    if settings.covariance.mode == "none" or marked is None:
        return per_token
    if settings.covariance.mode == "clip":
        return torch.where(marked > 0, per_token.detach(), per_token)
    return per_token + settings.covariance.kl_coef * marked * log_ratio.abs()


def finish(
    per_token: torch.Tensor, tokens: TokenBatch, settings: AlgorithmSettings, stats: Stats
) -> tuple[torch.Tensor, Stats]:
    """The terms every policy loss shares (rollout correction, KL, entropy bonus), and the weighted sum."""
    correction = rollout_correction(tokens, settings)
    if correction is not None:
        per_token = per_token * correction
        stats["rollout_correction"] = mean_stat(correction, tokens)
        if settings.rollout_correction_outside == "mask":
            stats["rollout_masked_share"] = mean_stat((correction == 0).to(correction.dtype), tokens)
    if settings.old_logprobs == "recompute" and tokens.rollout_logprobs is not None:
        gap = (tokens.old_logprobs - tokens.rollout_logprobs).abs()
        stats["gap_mean"] = mean_stat(gap, tokens)
        stats["gap_max"] = extreme(gap, tokens, "max")
    stats["policy_loss"] = Stat(tokens.weighted(per_token.detach()), tokens.weights.sum())
    if tokens.ref_logprobs is not None:
        divergence = kl.estimate(tokens.made(tokens.logprobs), tokens.made(tokens.ref_logprobs), settings.kl)
        stats["kl"] = mean_stat(divergence, tokens)
        if settings.kl.place == "loss":
            per_token = per_token + settings.kl.coef * divergence
    if tokens.entropy is not None:
        stats["entropy"] = mean_stat(tokens.entropy, tokens)
        if settings.entropy_coef:
            per_token = per_token - settings.entropy_coef * tokens.entropy
    return tokens.weighted(per_token), stats


def ratio_stats(log_ratio: torch.Tensor, tokens: TokenBatch, settings: AlgorithmSettings) -> Stats:
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
        stats["ratio_max"] = extreme(ratio, tokens, "max")
        stats["ratio_min"] = extreme(ratio, tokens, "min")
    return stats


def mean_stat(values: torch.Tensor, tokens: TokenBatch) -> Stat:
    """A mean over the tokens the model made."""
    return Stat(tokens.made(values.detach()).sum(), tokens.mask.sum())


def extreme(values: torch.Tensor, tokens: TokenBatch, reduce: Literal["max", "min"]) -> Stat:
    """The largest or smallest over the tokens the model made."""
    if not len(values):
        return Stat(0.0, 0.0, reduce)
    outside = float("-inf") if reduce == "max" else float("inf")
    seen = torch.where(tokens.mask > 0, values.detach(), torch.full_like(values, outside))
    return Stat(seen.max() if reduce == "max" else seen.min(), tokens.mask.sum(), reduce)
