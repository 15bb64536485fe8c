"""Estimators of the divergence KL(policy ‖ reference) from the log-probabilities of tokens the policy made."""

from __future__ import annotations

from tidemill.imports import torch
from tidemill.recipe.config import KL


def estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, kl: KL) -> torch.Tensor:
    """Per token, with d = log π − log π_ref (Schulman 2020): k1 = d, k2 = d²/2, k3 = e^(−d) − 1 + d, abs = |d|."""
    d = logprobs - ref_logprobs
    if kl.clamp_log_ratio is not None:
        d = d.clamp(-kl.clamp_log_ratio, kl.clamp_log_ratio)
    match kl.estimator:
        case "k1":
            value = d
        case "k2":
            value = 0.5 * d.square()
        case "k3":
            value = torch.expm1(-d) + d
        case "abs":
            value = d.abs()
    return value if kl.clamp is None else value.clamp(-kl.clamp, kl.clamp)


def adapted(coef: float, measured: float, target: float, horizon: int, samples: int) -> float:
    """The next coefficient of an adaptive controller (Ziegler et al. 2019): proportional, with a bounded step."""
    error = min(max(measured / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * min(samples / horizon, 1.0))  # a step longer than the horizon must not turn its sign
