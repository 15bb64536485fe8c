"""Advantages from rewards: over groups, over the batch, or over time. Pure arithmetic in float64, float32 out."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bias = Literal["sample", "population"]
Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["std", "batch_std", "none"]


def group_advantages(
    reward: npt.ArrayLike,
    group: npt.ArrayLike,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "std",
    std_bias: Bias = "sample",
    std_eps: float = 1e-4,
    group_of_one: Literal["zero", "reward"] = "zero",
) -> npt.NDArray[np.float32]:
    """One advantage per sample: its reward less its group's baseline, over the spread that `scale` names.

    A group of equal rewards has advantage exactly 0 whatever the epsilon. Which rows are neighbours does not matter.
    """
    r = np.asarray(reward, np.float64)
    index, counts = group_index(group)
    if baseline == "none":
        centred = r.copy()
    else:
        centred = r - mean_of(r, index, counts)[index]
        centred[spread_of(r, index, counts)[index] == 0] = 0.0  # equal rewards: no rounding dust
    n = counts[index]
    if baseline == "leave_one_out":
        # r − mean of the others = n/(n−1) · (r − mean of all)
        centred *= np.where(n > 1, n / np.maximum(n - 1, 1), 1.0)
    scaled = centred / divisor(r, index, counts, scale, std_bias, std_eps)
    if baseline != "none":
        scaled = np.where(n > 1, scaled, r if group_of_one == "reward" else 0.0)
    return scaled.astype(np.float32)


def divisor(r: Floats, index: npt.NDArray[np.int64], counts: Floats, scale: Scale, bias: Bias, eps: float) -> Floats:
    match scale:
        case "none":
            return np.ones_like(r)
        case "batch_std":
            everything = np.zeros_like(index)
            std = std_of(r, everything, np.array([float(len(r))]), bias)[everything]
        case "std":
            std = std_of(r, index, counts, bias)[index]
    return np.where(std == 0, 1.0, std + eps)


def group_index(group: npt.ArrayLike) -> tuple[npt.NDArray[np.int64], Floats]:
    """Each row's group as 0..groups-1, and the groups' sizes."""
    _, index, counts = np.unique(np.asarray(group), return_inverse=True, return_counts=True)
    return index.reshape(-1).astype(np.int64), counts.astype(np.float64)


def mean_of(r: Floats, index: npt.NDArray[np.int64], counts: Floats) -> Floats:
    return np.bincount(index, weights=r, minlength=len(counts)) / counts


def spread_of(r: Floats, index: npt.NDArray[np.int64], counts: Floats) -> Floats:
    """Largest less smallest reward of each group."""
    high = np.full(len(counts), -np.inf)
    low = np.full(len(counts), np.inf)
    np.maximum.at(high, index, r)
    np.minimum.at(low, index, r)
    spread: Floats = high - low
    return spread


def std_of(r: Floats, index: npt.NDArray[np.int64], counts: Floats, bias: Bias) -> Floats:
    """Exactly 0 for a group of one or of equal rewards."""
    squares = np.square(r - mean_of(r, index, counts)[index])
    squares[spread_of(r, index, counts)[index] == 0] = 0.0
    total = np.bincount(index, weights=squares, minlength=len(counts))
    result: Floats = np.sqrt(total / np.maximum(counts - (bias == "sample"), 1.0))
    return result


def whitened(values: Floats, mask: npt.ArrayLike, eps: float = 1e-8) -> Floats:
    """Mean 0 and (population) standard deviation 1 over the tokens with mask 1; 0 elsewhere. All equal: all 0."""
    here = np.asarray(mask, np.bool_)
    chosen = values[here]
    if len(chosen) == 0 or chosen.max() == chosen.min():
        return np.zeros_like(values)
    scaled: Floats = np.where(here, values - chosen.mean(), 0.0) / (chosen.std() + eps)
    return scaled


def gae(rewards: Floats, values: Floats, mask: npt.ArrayLike, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """Generalised advantage estimation (Schulman et al. 2016) over one response: advantages and returns per token.

    δ_t = r_t + γ V_{t+1} − V_t,  A_t = δ_t + γλ A_{t+1},  R_t = A_t + V_t; after the last token V and A are 0.
    Tokens the model did not make (mask 0) are skipped: V_{t+1} is the value at the model's next token, and a reward
    that falls on a skipped token counts for the model's token before it.
    """
    made = np.flatnonzero(np.asarray(mask))
    advantages, returns = np.zeros_like(values), np.zeros_like(values)
    if len(made) == 0:
        return advantages, returns
    owner = np.maximum(np.searchsorted(made, np.arange(len(rewards)), side="right") - 1, 0)
    r = np.bincount(owner, weights=rewards, minlength=len(made))
    next_value = next_advantage = 0.0
    for k in range(len(made) - 1, -1, -1):
        t = made[k]
        delta = r[k] + gamma * next_value - values[t]
        next_advantage = delta + gamma * lam * next_advantage
        next_value = values[t]
        advantages[t] = next_advantage
        returns[t] = next_advantage + values[t]
    return advantages, returns


def rewards_to_go(rewards: Floats, gamma: float = 1.0) -> Floats:
    """R_t = r_t + γ R_{t+1} over one response."""
    out = np.zeros_like(rewards)
    later = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        later = rewards[t] + gamma * later
        out[t] = later
    return out
