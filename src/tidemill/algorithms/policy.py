"""What the policy-gradient algorithms do alike: group advantages, marks of tokens to hold back, rows to keep."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tidemill.algorithms import tables
from tidemill.algorithms.advantages import group_advantages, group_index, spread_of
from tidemill.algorithms.api import Algorithm, Kept, Stats, TokenBatch
from tidemill.algorithms.losses import (
    clipped_surrogate,
    finish,
    held_back,
    log_ratio_of,
    ratio_stats,
    sequence_log_ratio,
)
from tidemill.algorithms.shaping import sample_rewards, token_rows
from tidemill.algorithms.tables import FINISH, old_column
from tidemill.batch import GROUP, ID, Batch, Column
from tidemill.graph import Graph
from tidemill.recipe.config import Config

Floats = npt.NDArray[np.float64]


def advantages_of(batch: Batch, config: Config) -> Batch:
    """Advantages of complete groups under the recipe's baseline and scale."""
    settings = config.algorithm
    made = group_advantages(
        sample_rewards(batch, config),
        batch.values(GROUP),
        baseline=settings.baseline,
        scale=settings.advantage_scale,
        std_bias=settings.std_bias,
        std_eps=settings.std_eps,
        group_of_one=settings.group_of_one,
    )
    return with_marks(batch, Column(made), config)


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


def sees_whole_step(config: Config) -> bool:
    return config.algorithm.advantage_scale == "batch_std" or config.algorithm.covariance.mode != "none"


class GroupPolicy(Algorithm):
    """A policy, rewards, group advantages and a clipped ratio per token; algorithms override the rest."""

    def graph(self, config: Config) -> Graph:
        return tables.policy_graph(self.name, config)

    def advantages(self, batch: Batch, config: Config) -> Batch:
        return advantages_of(batch, config)

    def keep(self, batch: Batch, config: Config) -> Kept:
        return keep_of(batch, config)

    def teaches(self, batch: Batch, config: Config) -> Kept:
        return teaches_of(batch, config)

    def wants_whole_step(self, config: Config) -> bool:
        return sees_whole_step(config)

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[Tensor, Stats]:
        return clipped_loss(tokens, config)


def clipped_loss(tokens: TokenBatch, config: Config) -> tuple[Tensor, Stats]:
    """−min(ρA, clip(ρ)A) with one ratio ρ per token."""
    return surrogate_loss(log_ratio_of(tokens), tokens, config)


def sequence_loss(tokens: TokenBatch, config: Config, per_token: bool) -> tuple[Tensor, Stats]:
    """The same with one ratio per response: the product of its tokens' ratios, or their geometric mean. It stands at
    each token of the response; with sample_mean they add up to the response's own objective."""
    return surrogate_loss(sequence_log_ratio(tokens, per_token), tokens, config)


def surrogate_loss(log_ratio: Tensor, tokens: TokenBatch, config: Config) -> tuple[Tensor, Stats]:
    settings = config.algorithm
    per_token = held_back(
        -clipped_surrogate(log_ratio, tokens.made(tokens.advantages), settings), log_ratio, tokens, settings
    )
    return finish(per_token, tokens, settings, ratio_stats(log_ratio, tokens, settings))
