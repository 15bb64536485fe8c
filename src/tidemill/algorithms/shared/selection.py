"""Choose what is learned from: rows that go on to learning, rows that have a gradient, tokens that are held back."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from tidemill.algorithms.api import Kept
from tidemill.algorithms.shared.advantages import Floats, group_index, spread_of
from tidemill.algorithms.shared.shaping import token_rows
from tidemill.algorithms.shared.tables import FINISH, old_column
from tidemill.batch import GROUP, ID, Batch, Column
from tidemill.recipe.config import Config


def with_marks(batch: Batch, advantages: Column, config: Config) -> Batch:
    """The columns of the stage `advantage`: beside the advantages, the tokens that clip-cov or KL-cov holds back."""
    if config.algorithm.covariance.mode == "none":
        return Batch({"advantages": advantages})
    per_token = advantages.values if advantages.offsets is not None else advantages.values[token_rows(batch)]
    return Batch({"advantages": advantages, "held_back": covariance_marks(batch, per_token, config)})


def covariance_marks(batch: Batch, advantages: npt.NDArray[np.float32], config: Config) -> Column:
    """1.0 at the tokens to hold back. cov_t = (log π_t − mean)(A_t − mean) over the step's tokens (Cui et al. 2025).

    Taken once for the whole step, with the policy that made it, so cutting the step differently changes nothing. KL-cov
    takes the largest; clip-cov draws from those between `low` and `high`, by a hash of sample and position.
    """
    settings = config.algorithm.covariance
    made = batch.values("mask") != 0
    logprobs = batch.values(old_column(config)).astype(np.float64)
    marks = np.zeros(len(made), np.float32)
    if made.any():
        cov = (logprobs - logprobs[made].mean()) * (advantages - advantages[made].astype(np.float64).mean())
        count = max(1, int(settings.share * made.sum()))
        if settings.mode == "kl":
            order = np.lexsort((draws(batch), -cov))
            marks[[i for i in order if made[i]][:count]] = 1.0
        else:
            eligible = np.flatnonzero(made & (cov > settings.low) & (cov < settings.high))
            marks[eligible[np.argsort(draws(batch)[eligible], kind="stable")][:count]] = 1.0
    return Column(marks, batch["mask"].offsets)


def draws(batch: Batch) -> Floats:
    """A number in [0, 1) for every token, made of its sample's id and its position alone."""
    streams = []
    for id, length in zip(batch.values(ID).tolist(), batch["mask"].lengths.tolist()):
        seed = int.from_bytes(hashlib.blake2b(str(id).encode(), digest_size=8).digest(), "big")
        streams.append(np.random.default_rng(seed).random(length))
    return np.concatenate(streams) if streams else np.empty(0)


def keep_of(batch: Batch, config: Config) -> Kept:
    """Rows that have something to teach: of groups whose rewards differ, and not cut off, where the recipe says so."""
    kept = np.ones(batch.rows, np.bool_)
    if config.algorithm.dynamic_sampling:
        index, counts = group_index(batch.values(GROUP))
        kept &= spread_of(batch.values("reward").astype(np.float64), index, counts)[index] > 0
    return kept & whole_of(batch, config)


def whole_of(batch: Batch, config: Config) -> Kept:
    """Rows that were not cut off, where the recipe drops those that were; else all."""
    if not config.algorithm.overlong.drop_truncated:
        return np.ones(batch.rows, np.bool_)
    return np.asarray(batch.values("finish") != FINISH.index("length"), np.bool_)


def teaches_of(batch: Batch, config: Config) -> Kept:
    """Without another term in the loss, an advantage of 0 is a gradient of 0. A group counts as one: it is learned
    together, for its prompt's sake."""
    settings = config.algorithm
    has_other_terms = settings.entropy_coef != 0 or settings.covariance.mode == "kl"
    has_other_terms |= config.learn.moe.balance == "aux_loss"
    if has_other_terms or ("ref_logprobs" in batch and settings.kl.place == "loss"):
        return np.ones(batch.rows, np.bool_)
    advantages = batch["advantages"]
    row = np.arange(batch.rows) if advantages.offsets is None else np.repeat(np.arange(batch.rows), advantages.lengths)
    own = np.bincount(row, weights=advantages.gather(np.arange(batch.rows)).values != 0, minlength=batch.rows)
    index, counts = group_index(batch.values(GROUP))
    teaches: Kept = np.bincount(index, weights=own, minlength=len(counts))[index] > 0
    return teaches
