"""Credit by turn: which part of a conversation's reward each of its turns is learned with.

`turns` holds where each turn begins in the response, in the order in which they were said, `turn_rewards` what the
environment gave for each. What a sample's reward holds beyond these (another reward function, a penalty for length)
belongs to the last turn, so that the turns' rewards always add up to the sample's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from tidemill.algorithms.shared import shaping
from tidemill.algorithms.shared.advantages import Floats, Scale, group_advantages
from tidemill.algorithms.shared.shaping import sample_rewards, task_rewards, token_kl, token_rows
from tidemill.batch import GROUP, Batch, Column
from tidemill.recipe.config import Config

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Turns:
    """All turns of a batch, row after row, each row's in the order in which they were said."""

    row: Ints
    number: Ints  # 0, 1, … within the row
    reward: Floats
    of_token: Ints  # the turn of each response token; −1 before a row's first


def is_by_turn(config: Config) -> bool:
    return config.algorithm.credit.by == "turn"


def rivals(batch: Batch) -> Ints:
    """Whom a sample is compared with: its group, of games of several players those on the same seat."""
    groups: Ints = batch.values(GROUP).astype(np.int64)
    if "seat" not in batch:
        return groups
    keys = np.stack([groups, batch.values("seat").astype(np.int64)])
    found: Ints = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return found


def turns_of(batch: Batch) -> Turns:
    """A sample that never spoke has no turn."""
    begins, rewards, mask = batch["turns"], batch["turn_rewards"], batch["mask"]
    counts, lengths = begins.lengths.astype(np.int64), mask.lengths.astype(np.int64)
    row = np.repeat(np.arange(batch.rows), counts)
    firsts = np.cumsum(counts) - counts
    number = np.arange(len(row)) - np.repeat(firsts, counts)
    of_token = np.full(int(lengths.sum()), -1, np.int64)
    at = 0
    for i, length in enumerate(lengths.tolist()):
        places = begins[i].astype(np.int64)
        order = np.argsort(places, kind="stable")  # trajectories lie behind one another, their turns may interleave
        if len(order):
            found = np.searchsorted(places[order], np.arange(length), side="right") - 1
            of_token[at : at + length] = np.where(found >= 0, firsts[i] + order[np.maximum(found, 0)], -1)
        at += length
    flat = rewards.gather(np.arange(batch.rows)).values.astype(np.float64)
    return Turns(row, number, flat, of_token)


def turn_rewards(batch: Batch, turns: Turns, config: Config) -> Floats:
    """Each turn's own reward, with the rest of the sample's on its last turn."""
    rewards = turns.reward.copy()
    task = task_rewards(batch, config)
    rest = task - np.bincount(turns.row, weights=rewards, minlength=batch.rows)
    last = np.flatnonzero(np.diff(turns.row, append=batch.rows) != 0)
    rewards[last] += rest[turns.row[last]]
    return rewards


def less_divergence(rewards: Floats, batch: Batch, turns: Turns, config: Config) -> Floats:
    """With `kl.place: reward` each turn loses coef · the sum of its tokens' estimates."""
    estimates = token_kl(batch, config)
    if estimates is None:
        return rewards
    said = turns.of_token >= 0
    spent = np.bincount(turns.of_token[said], weights=estimates[said], minlength=len(rewards))
    return np.asarray(rewards - config.algorithm.kl.coef * spent)


def returns(rewards: Floats, turns: Turns, discount: float) -> Floats:
    """G_t = r_t + γ G_{t+1} over each row's turns."""
    found = rewards.copy()
    for k in range(len(found) - 2, -1, -1):
        if turns.row[k] == turns.row[k + 1]:
            found[k] += discount * found[k + 1]
    return found


def compared(batch: Batch, config: Config, *, scale: Scale | None = None) -> Column:
    """Rewards less what the others had: one advantage per sample, or by turn one per response token.

    By turn, G_t is compared with the group's returns from the same turn on, over the trajectories that came so far
    (`baseline: turn`), or with the returns from all its turns (`group`).
    """
    settings = config.algorithm
    how = partial(
        group_advantages,
        baseline=settings.baseline,
        scale=scale or settings.advantage_scale,
        std_bias=settings.std_bias,
        std_eps=settings.std_eps,
        group_of_one=settings.group_of_one,
    )
    group = rivals(batch)
    if not is_by_turn(config):
        return Column(how(sample_rewards(batch, config), group))
    turns = turns_of(batch)
    rewards = less_divergence(turn_rewards(batch, turns, config), batch, turns, config)
    found = returns(rewards, turns, settings.credit.discount)
    own = group[turns.row]
    if settings.credit.baseline == "turn":
        own = np.unique(np.stack([own, turns.number]), axis=1, return_inverse=True)[1].reshape(-1)
    made = how(found, own)
    spoken = (turns.of_token >= 0) & (batch.values("mask") != 0)
    spread = np.where(spoken, made[turns.of_token] if len(made) else 0.0, 0.0)
    return Column(spread.astype(np.float32), batch["mask"].offsets)


def token_rewards(batch: Batch, config: Config) -> Floats:
    """One reward per response token: the divergence where it arises, and the task's reward at the model's last token;
    by turn, each turn's reward at the turn's own last token."""
    if not is_by_turn(config):
        return shaping.token_rewards(batch, config)
    turns = turns_of(batch)
    estimates = token_kl(batch, config)
    rewards = np.zeros(len(turns.of_token)) if estimates is None else -config.algorithm.kl.coef * estimates
    own = turn_rewards(batch, turns, config)
    spoken = np.flatnonzero((turns.of_token >= 0) & (batch.values("mask") != 0))
    last = np.full(len(own), -1, np.int64)
    last[turns.of_token[spoken]] = spoken  # the latest assignment stays: tokens come in order
    np.add.at(rewards, last[last >= 0], own[last >= 0])
    return rewards


def per_token(advantages: Column, batch: Batch) -> Floats:
    """Spread over the response tokens."""
    values = advantages.values.astype(np.float64)
    return values if advantages.offsets is not None else values[token_rows(batch)]
