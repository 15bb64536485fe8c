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
