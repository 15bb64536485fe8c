"""Arithmetic that losses share: what a mean is taken over, clipped ratios, and the statistics each loss reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidemill.algorithms import kl
from tidemill.algorithms.api import Stat, Stats, TokenBatch
from tidemill.batch import Column
from tidemill.config import Algorithm

Aggregation = Literal["token_mean", "sample_mean", "group_mean", "constant"]


@dataclass(frozen=True, slots=True)
class Totals:
    """What an update's weights divide by, counted over all its samples on all ranks."""

    tokens: int
    samples: int
    group_tokens: dict[int, int]  # model-made tokens of each group

    def __add__(self, other: Totals) -> Totals:
        groups = dict(self.group_tokens)
        for group, tokens in other.group_tokens.items():
            groups[group] = groups.get(group, 0) + tokens
        return Totals(self.tokens + other.tokens, self.samples + other.samples, groups)


def row_tokens(mask: Column) -> npt.NDArray[np.int64]:
    """Model-made tokens of each row."""
    assert mask.offsets is not None, "the mask is a jagged column"
    sums = np.concatenate([[0], np.cumsum(mask.values, dtype=np.int64)])
    counts: npt.NDArray[np.int64] = sums[mask.offsets[1:]] - sums[mask.offsets[:-1]]
    return counts


def totals(mask: Column, group: npt.ArrayLike) -> Totals:
    tokens = row_tokens(mask)
    ids, index = np.unique(np.asarray(group, np.int64), return_inverse=True)
    per_group = np.bincount(index.reshape(-1), weights=tokens, minlength=len(ids)).astype(np.int64)
    return Totals(int(tokens.sum()), len(tokens), dict(zip(ids.tolist(), per_group.tolist())))


def token_weights(
    mask: Column,
    group: npt.ArrayLike,
    aggregation: Aggregation,
    constant_length: int,
    whole: Totals | None = None,
) -> npt.NDArray[np.float32]:
    """The weight of every response token in the update's loss, flat like `mask.values`.

    token_mean   1 / tokens of the update               (DAPO)
    sample_mean  1 / (samples · tokens of the sample)   (GRPO)
    group_mean   1 / (groups · tokens of the group)
    constant     1 / (samples · constant_length)        (Dr. GRPO)

    `whole` counts the whole update when these rows are only a part of it. Tokens the model did not make weigh 0; a
    sample without model-made tokens counts as a sample whose loss is 0.
    """
    whole = totals(mask, group) if whole is None else whole
    tokens = np.maximum(row_tokens(mask), 1).astype(np.float64)
    match aggregation:
        case "token_mean":
            per_row = np.full(len(tokens), 1.0 / max(whole.tokens, 1))
        case "sample_mean":
            per_row = 1.0 / (whole.samples * tokens)
        case "group_mean":
            of_group = np.array([max(whole.group_tokens[int(g)], 1) for g in np.asarray(group)], np.float64)
            per_row = 1.0 / (len(whole.group_tokens) * of_group)
        case "constant":
            per_row = np.full(len(tokens), 1.0 / (whole.samples * constant_length))
    weights = np.repeat(per_row, mask.lengths) * mask.values
    return weights.astype(np.float32)


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
    stats["policy_loss"] = Stat((tokens.weights * per_token).detach().sum(), reduce="sum")
    if tokens.ref_logprobs is not None:
        divergence = kl.estimate(tokens.logprobs * tokens.mask, tokens.ref_logprobs * tokens.mask, settings.kl)
        stats["kl"] = mean_stat(divergence, tokens)
        if settings.kl.place == "loss":
            per_token = per_token + settings.kl.coef * divergence
    if tokens.entropy is not None:
        stats["entropy"] = mean_stat(tokens.entropy, tokens)
        if settings.entropy_coef:
            per_token = per_token - settings.entropy_coef * tokens.entropy
    loss = (tokens.weights * per_token).sum()
    stats["loss"] = Stat(loss.detach(), reduce="sum")
    return loss, stats


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
