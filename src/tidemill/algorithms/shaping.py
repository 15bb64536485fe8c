"""Rewards as advantages see them: the task's reward, less the divergence from the reference when the recipe says so."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tidemill.algorithms import kl
from tidemill.algorithms.tables import old_column
from tidemill.batch import Batch
from tidemill.config import Config


def token_kl(batch: Batch, config: Config) -> npt.NDArray[np.float64] | None:
    """The estimate at every response token (0 where the model made none), or None when rewards do not carry it."""
    settings = config.algorithm.kl
    if settings.coef == 0 or settings.place != "reward":
        return None
    policy = torch.from_numpy(batch.values(old_column(config)).astype(np.float64))
    reference = torch.from_numpy(batch.values("ref_logprobs").astype(np.float64))
    estimate: npt.NDArray[np.float64] = kl.estimate(policy, reference, settings).numpy()
    estimate *= batch.values("mask")
    return estimate


def sample_rewards(batch: Batch, config: Config) -> npt.NDArray[np.float64]:
    """One reward per sample; with `kl.place: reward` each loses coef · the sum of its tokens' estimates."""
    rewards: npt.NDArray[np.float64] = batch.values("reward").astype(np.float64)
    per_token = token_kl(batch, config)
    if per_token is None:
        return rewards
    row = np.repeat(np.arange(batch.rows), batch["mask"].lengths)
    return rewards - config.algorithm.kl.coef * np.bincount(row, weights=per_token, minlength=batch.rows)
