"""Rewards as advantages see them: the task's reward, less what the recipe takes for length and for divergence."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tidemill.algorithms.shared import kl
from tidemill.algorithms.shared.tables import old_column
from tidemill.batch import Batch
from tidemill.imports import torch
from tidemill.recipe.config import Config

Floats = npt.NDArray[np.float64]


def task_rewards(batch: Batch, config: Config) -> Floats:
    """One reward per sample, with DAPO's soft overlong penalty: 0 until max_new_tokens − buffer, then linear."""
    rewards: Floats = batch.values("reward").astype(np.float64)
    overlong = config.algorithm.overlong
    if overlong.buffer:
        longest = config.rollout.max_new_tokens
        over = batch["mask"].lengths - (longest - overlong.buffer)
        rewards = rewards - overlong.penalty * np.clip(over / overlong.buffer, 0.0, 1.0)
    return rewards


def token_kl(batch: Batch, config: Config) -> Floats | None:
    """The estimate at every response token (0 where the model made none), or None when rewards do not carry it."""
    settings = config.algorithm.kl
    if settings.coef == 0 or settings.place != "reward":
        return None
    policy = torch.from_numpy(batch.values(old_column(config)).astype(np.float64))
    reference = torch.from_numpy(batch.values("ref_logprobs").astype(np.float64))
    estimate: Floats = kl.estimate(policy, reference, settings).numpy()
    return np.where(batch.values("mask") != 0, estimate, 0.0)


def sample_rewards(batch: Batch, config: Config) -> Floats:
    """One reward per sample; with `kl.place: reward` each loses coef · the sum of its tokens' estimates."""
    rewards = task_rewards(batch, config)
    per_token = token_kl(batch, config)
    if per_token is None:
        return rewards
    return rewards - config.algorithm.kl.coef * np.bincount(token_rows(batch), weights=per_token, minlength=batch.rows)


def token_rewards(batch: Batch, config: Config) -> Floats:
    """One reward per response token: the divergence where it arises, the task's reward at the model's last token."""
    per_token = token_kl(batch, config)
    rewards = np.zeros(len(batch.values("mask"))) if per_token is None else -config.algorithm.kl.coef * per_token
    task = task_rewards(batch, config)
    for row, last in enumerate(last_tokens(batch)):
        if last >= 0:
            rewards[last] += task[row]
    return rewards


def last_tokens(batch: Batch) -> npt.NDArray[np.int64]:
    """Flat index of each row's last model-made token; −1 where there is none."""
    mask = batch["mask"]
    assert mask.offsets is not None, "the mask is a jagged column"
    made = np.where(mask.values != 0, np.arange(len(mask.values)), -1)
    running = np.maximum.accumulate(made) if len(made) else made
    last = np.where(mask.lengths > 0, running[np.maximum(mask.offsets[1:] - 1, 0)] if len(made) else -1, -1)
    return np.asarray(np.where(last >= mask.offsets[:-1], last, -1), np.int64)


def token_rows(batch: Batch) -> npt.NDArray[np.int64]:
    """The row of every response token."""
    return np.repeat(np.arange(batch.rows), batch["mask"].lengths)
