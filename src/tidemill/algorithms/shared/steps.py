"""What algorithms share whose policy is a network: rows are fragments, so many decisions of one environment, and the
environment itself gives the rewards. Columns are jagged over decisions unless noted.

ends: 0 the episode goes on, 1 it is over, 2 it was cut off (a time limit) and would have gone on.
values, next_values: of the state in which the decision was made, and of the one it led to; after the end of an episode
the latter is 0, or of the last state where it was cut off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.algorithms.api import Algorithm, Stat, Stats, TokenBatch
from tidemill.algorithms.shared.advantages import whitened
from tidemill.algorithms.shared.losses import RATIO_SETTINGS
from tidemill.algorithms.shared.tables import unique
from tidemill.batch import GROUP, ID, LENGTH, VERSION, Batch, Column
from tidemill.graph import Graph, Stage
from tidemill.imports import torch
from tidemill.recipe.config import Config

SOURCE = (ID, GROUP)
LIMIT = 10.0  # of a scaled reward
TERMINAL = 1  # of `ends`
Floats = npt.NDArray[np.float64]


def is_network(config: Config) -> bool:
    return config.model.policy is not None


def statistics(config: Config) -> tuple[str, ...]:
    """gains: (3,) a row: count, sum and sum of squares of discounted returns, for the scale of rewards."""
    policy = config.model.policy
    return ("gains",) if policy is not None and "rewards" in policy.normalise else ()


def memory(config: Config) -> tuple[str, ...]:
    """state: one vector a row: the policy's memory before the first decision."""
    policy = config.model.policy
    return ("state",) if policy is not None and policy.kind == "gru" else ()


def rollout(config: Config, *more: str, reads: tuple[str, ...] = ()) -> Stage:
    own = ("observations", "actions", "logprobs", "rewards", "ends", "mask", "versions", *more)
    writes = (*own, *statistics(config), *memory(config), VERSION, LENGTH)
    return Stage("rollout", "rollout", (*SOURCE, *reads), unique(writes), "group")


def learn(config: Config, *more: str) -> Stage:
    own = (ID, GROUP, LENGTH, "observations", "actions", "logprobs", "ends", "mask", "versions")
    return Stage("learn", "actor", unique((*own, *more, *statistics(config), *memory(config))), scope="group")


def graph(name: str, config: Config, *values: str, returns: bool = True) -> Graph:
    """Of algorithms that learn a step's decisions once. `values`: a critic's columns, if there is one."""
    made = ("advantages", "returns") if returns else ("advantages",)
    scale = ("reward_scale",) if statistics(config) else ()
    reads = (ID, GROUP, "rewards", "ends", "mask", *scale, *values)
    judged = Stage("advantage", "reward", reads, made, "group")
    critic = ("values",) if values else ()
    stages = [rollout(config, *scale, *values)]
    more: tuple[str, ...] = ()
    if config.algorithm.old_logprobs == "recompute":
        own = (ID, GROUP, LENGTH, "observations", "actions", "ends", *memory(config))
        stages.append(Stage("old_logprobs", "actor", own, ("old_logprobs",)))
        more = ("old_logprobs",)
    return Graph(name, SOURCE, (*stages, judged, learn(config, *made, *critic, *more)))


def scaled_rewards(batch: Batch) -> Floats:
    """As the critic learns them: divided by the spread of returns, where rewards are normalised."""
    rewards: Floats = batch.values("rewards").astype(np.float64)
    if "reward_scale" not in batch:
        return rewards
    scale = np.repeat(batch.values("reward_scale").astype(np.float64), batch["rewards"].lengths)
    return np.asarray((rewards * scale).clip(-LIMIT, LIMIT))


def by_time(batch: Batch, *columns: npt.NDArray[np.generic]) -> tuple[list[Floats], npt.NDArray[np.bool_]]:
    """Flat columns as (longest, rows) arrays, with zeros behind shorter rows, and where there is something."""
    lengths = batch["rewards"].lengths
    is_there = np.arange(int(lengths.max(initial=0)))[:, None] < lengths
    made = []
    for column in columns:
        whole = np.zeros(is_there.shape[::-1])
        whole[is_there.T] = column
        made.append(whole.T.copy())
    return made, is_there


def gae(batch: Batch, gamma: float, lam: float, rewards: Floats) -> tuple[Floats, Floats]:
    """Generalised advantage estimation (Schulman et al. 2016) over fragments; flat advantages and returns.

    δ_t = r_t + γ V'_t − V_t with V' the column `next_values`;  A_t = δ_t + γλ A_{t+1} within an episode.
    """
    values = batch.values("values").astype(np.float64)
    delta = rewards + gamma * batch.values("next_values") - values
    (delta, ends), is_there = by_time(batch, delta, batch.values("ends"))
    goes_on = gamma * lam * (ends == 0)
    later = np.zeros(delta.shape[1])
    for t in range(len(delta) - 1, -1, -1):
        later = delta[t] + goes_on[t] * later
        delta[t] = later
    advantages = delta.T[is_there.T]
    return advantages, advantages + values


def returns(batch: Batch, gamma: float, rewards: Floats) -> Floats:
    """Discounted rewards to the end of the episode, or of the fragment."""
    (rewards, ends), is_there = by_time(batch, rewards, batch.values("ends"))
    goes_on, later = gamma * (ends == 0), np.zeros(rewards.shape[1])
    for t in range(len(rewards) - 1, -1, -1):
        later = rewards[t] + goes_on[t] * later
        rewards[t] = later
    return rewards.T[is_there.T]


def column(values: Floats, batch: Batch) -> Column:
    return Column(values.astype(np.float32), batch["rewards"].offsets)


def normalised(advantages: Floats, config: Config) -> Floats:
    """Mean 0 and standard deviation 1 over the step, where the recipe wants it."""
    return whitened(advantages, np.ones(len(advantages))) if config.algorithm.critic.whiten else advantages


def tokens(scores: Any, columns: Mapping[str, torch.Tensor], decisions: int) -> TokenBatch:
    """Decisions as a loss sees them. `scores`: of a network (`models.policy.Scores`); `decisions`: of the minibatch."""
    now = scores.logprobs
    return TokenBatch(
        logprobs=now,
        old_logprobs=columns.get("old_logprobs", columns["logprobs"]),
        rollout_logprobs=columns["logprobs"],
        ref_logprobs=columns.get("ref_logprobs"),
        advantages=columns.get("advantages", torch.zeros_like(now)),
        weights=torch.full_like(now, 1.0 / decisions),
        mask=torch.ones_like(now),
        row=torch.zeros(len(now), dtype=torch.int64, device=now.device),
        rows=1,
        entropy=scores.entropy,
        values=scores.values,
        columns={**columns, **scores.more},
    )


def loss(
    algorithm: Algorithm, config: Config, scores: Any, columns: Mapping[str, torch.Tensor], units: int, decisions: int
) -> tuple[torch.Tensor, Stats]:
    """Loss and statistics of some `units` of a minibatch of so many decisions."""
    found, stats = algorithm.loss(tokens(scores, columns, decisions), config)
    return found, {"loss": Stat(found.detach(), units / decisions), **stats}


def with_critic(
    algorithm: Algorithm, loss: torch.Tensor, stats: Stats, tokens: TokenBatch, config: Config
) -> tuple[torch.Tensor, Stats]:
    """The policy's loss, and the critic's where one network has both."""
    if tokens.values is None or not is_network(config):  # a decoder's critic has a stage of its own
        return loss, stats
    more, judged = algorithm.value_loss(tokens, config)
    return loss + more, stats | judged


def closed_form(config: Config, is_ratio: bool) -> dict[str, float] | None:
    """The loss of a network's policy gradient, clipped or plain, as numbers. None where the recipe asks for more."""
    own = config.algorithm
    if own.kl.coef or own.dual_clip is not None or own.ratio_cap is not None or own.covariance.mode != "none":
        return None
    if own.rollout_correction != "none":
        return None
    return {
        "is_ratio": int(is_ratio),
        "clip_low": own.clip_low,
        "clip_high": own.clip_high,
        "value_coef": own.critic.value_coef,
        "value_clip": -1.0 if own.critic.value_clip is None else own.critic.value_clip,
        "entropy_coef": own.entropy_coef,
    }


# Samples that are learned from many times


def replayed(name: str, config: Config) -> Graph:
    rows = max(1, config.algorithm.replay.capacity // config.rollout.max_new_tokens)
    own = learn(config, "rewards", "next_observations")
    made = rollout(config, "next_observations", reads=("again",))
    return Graph(name, (*SOURCE, "again"), (made, replace(own, keeps=rows)))


def to_replay(config: Config, version: int, first_group: int, ranks: int) -> tuple[int, int]:
    """How many kept samples each rank learns from in an update, none before `replay.begin` decisions were made; and
    the seed that they are drawn with."""
    replay, seed = config.algorithm.replay, config.seed % (1 << 32) << 24 | version
    made = first_group * config.train.samples_per_prompt * config.rollout.max_new_tokens
    return (-(-replay.updates * (config.learn.minibatch or 256) // ranks) if made >= replay.begin else 0), seed


def targets(tokens: TokenBatch, config: Config) -> torch.Tensor:
    """r + γ · what the next state is worth; nothing after the end of an episode."""
    own = tokens.columns
    goes_on = (own["ends"] != TERMINAL).to(own["rewards"].dtype)
    return own["rewards"] + config.algorithm.critic.gamma * goes_on * own["q_next"]


def entropy_aim(config: Config) -> float:
    policy = config.model.policy
    assert policy is not None and policy.spaces is not None
    given = config.algorithm.replay.entropy
    return -float(policy.spaces["dimensions"]) if given is None else given


def unused_by_critics() -> dict[str, str]:
    ratio = dict.fromkeys(RATIO_SETTINGS, "has no ratio: it follows its critics")
    return ratio | dict.fromkeys(("entropy_coef", "old_logprobs"), "does not compare with the policy that acted")
