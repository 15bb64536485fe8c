"""The mismatch meter: how far an engine's log-probabilities are from the learner's, for the same tokens and weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from tidemill.batch import Array


@dataclass(frozen=True, slots=True)
class Mismatch:
    mean: float  # of |rollout - learner|, in nats
    max: float
    ratio_mean: float  # of exp(learner - rollout): 1 when they agree
    ratio_max: float
    ratio_far: float  # share of tokens whose ratio is more than a tenth from 1
    tokens: int

    def metrics(self, engine: str) -> dict[str, float]:
        return {f"mismatch/{engine}/{name}": float(value) for name, value in asdict(self).items()}


def measure(rollout: Array, learner: Array) -> Mismatch:
    """Both flat, one value per sampled token. Tokens that either side gave no number for count as infinitely far."""
    if rollout.shape != learner.shape:
        raise ValueError(f"one log-probability per token on both sides: got {rollout.shape} and {learner.shape}")
    if not rollout.size:
        return Mismatch(0.0, 0.0, 1.0, 1.0, 0.0, 0)
    gap = learner.astype(np.float64) - rollout.astype(np.float64)
    gap[~np.isfinite(gap)] = np.inf
    ratio = np.exp(np.minimum(gap, 80.0))
    size = np.abs(gap)
    far = np.abs(ratio - 1) > 0.1
    return Mismatch(
        float(size.mean()), float(size.max()), float(ratio.mean()), float(ratio.max()), float(far.mean()), rollout.size
    )
