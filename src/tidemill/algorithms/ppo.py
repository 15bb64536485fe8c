"""PPO (Schulman et al. 2017, arXiv:1707.06347) with a critic and generalised advantage estimation.

Advantages per token from token rewards and the critic's values; the policy's λ may depend on the length (VAPO, Yue et
al. 2025) and the critic's may differ from it. The critic learns by a clipped squared error.

Of a decoder the critic is a model of its own, with stages of its own. A network has both: one loss teaches them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tidemill.algorithms.api import Stat, Stats, TokenBatch
from tidemill.algorithms.grpo import GRPO
from tidemill.algorithms.shared import selection, steps, tables
from tidemill.algorithms.shared.advantages import gae, whitened
from tidemill.algorithms.shared.credit import token_rewards
from tidemill.algorithms.shared.losses import mean_stat
from tidemill.batch import GROUP, ID, LENGTH, Batch, Column
from tidemill.graph import Graph, Stage
from tidemill.imports import torch
from tidemill.recipe.config import Config, Critic


class PPO(GRPO):
    name = "ppo"
    about = "critic with generalised advantage estimation, clipped ratio, clipped values"
    paper = {"aggregation": "token_mean"}
    compares_samples = False
    credits_turns = True
    has_critic = True
    policies: tuple[str, ...] = ("decoder", "network")
    judges = "states"

    def graph(self, config: Config) -> Graph:
        if steps.is_network(config):
            return steps.graph(self.name, config, "values", "next_values")
        critic_reads = (
            ID,
            GROUP,
            LENGTH,
            "tokens",
            "prompt_length",
            "mask",
            "values",
            "returns",
            *tables.starts(config),
        )
        stages = (
            tables.rollout(config),
            tables.reward(config),
            *tables.policy_logprobs(config),
            Stage("values", "critic", (GROUP, "tokens", "prompt_length", LENGTH, *tables.starts(config)), ("values",)),
            tables.advantage(config, "values", writes=("advantages", "returns")),
            Stage("learn_values", "critic", critic_reads, scope="group"),
            tables.learn(config),
        )
        return Graph(self.name, tables.SOURCE, stages)

    def advantages(self, batch: Batch, config: Config) -> Batch:
        if steps.is_network(config):
            return self._of_steps(batch, config)
        mask, critic = batch["mask"], config.algorithm.critic
        assert mask.offsets is not None
        rewards, values = token_rewards(batch, config), batch.values("values").astype(np.float64)
        advantages, returns = np.zeros_like(values), np.zeros_like(values)
        for start, end in zip(mask.offsets[:-1], mask.offsets[1:]):
            row = slice(start, end)
            lam = policy_lambda(critic, int(mask.values[row].sum()))
            advantages[row], returns[row] = gae(rewards[row], values[row], mask.values[row], critic.gamma, lam)
            value_lam = critic.lam if critic.value_lam is None else critic.value_lam
            if value_lam != lam:
                returns[row] = gae(rewards[row], values[row], mask.values[row], critic.gamma, value_lam)[1]
        if critic.whiten:
            advantages = whitened(advantages, mask.values)
        made = selection.with_marks(batch, Column(advantages.astype(np.float32), mask.offsets), config)
        return made.merge({"returns": Column(returns.astype(np.float32), mask.offsets)})

    def _of_steps(self, batch: Batch, config: Config) -> Batch:
        critic, rewards = config.algorithm.critic, steps.scaled_rewards(batch)
        advantages, returns = steps.gae(batch, critic.gamma, critic.lam, rewards)
        if critic.value_lam not in (None, critic.lam):
            returns = steps.gae(batch, critic.gamma, critic.value_lam, rewards)[1]
        advantages = steps.normalised(advantages, config)
        return Batch({"advantages": steps.column(advantages, batch), "returns": steps.column(returns, batch)})

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[torch.Tensor, Stats]:
        loss, stats = super().loss(tokens, config)
        return steps.with_critic(self, loss, stats, tokens, config)

    def closed_form(self, config: Config) -> Mapping[str, float] | None:
        return steps.closed_form(config, is_ratio=True)

    def wants_whole_step(self, config: Config) -> bool:
        return config.algorithm.critic.whiten or super().wants_whole_step(config)

    def value_loss(self, tokens: TokenBatch, config: Config) -> tuple[torch.Tensor, Stats]:
        """coef · max((V − R)², (clip(V, V_old ± ε) − R)²); columns `values` (old) and `returns`."""
        critic = config.algorithm.critic
        assert tokens.values is not None, "the critic's new values"
        values, old, returns = map(tokens.made, (tokens.values, tokens.columns["values"], tokens.columns["returns"]))
        error = (values - returns).square()
        stats: Stats = {}
        if critic.value_clip is not None:
            clipped = old + (values - old).clamp(-critic.value_clip, critic.value_clip)
            clipped_error = (clipped - returns).square()
            is_clipped = ((values - old).abs() > critic.value_clip) & (clipped_error > error)
            stats["value_clip_share"] = mean_stat(is_clipped.to(error.dtype), tokens)
            error = torch.maximum(error, clipped_error)
        stats["value_loss"] = mean_stat(critic.value_coef * error, tokens)
        stats |= variance_sums(old, returns, tokens)
        return tokens.weighted(critic.value_coef * error), stats


def policy_lambda(critic: Critic, length: int) -> float:
    if critic.length_alpha is None or length == 0:
        return critic.lam
    return max(0.0, 1.0 - 1.0 / (critic.length_alpha * length))


def variance_sums(old: torch.Tensor, returns: torch.Tensor, tokens: TokenBatch) -> Stats:
    """Means from which `explained_variance` is made: they add up over micro-batches, a variance does not."""
    error = returns - old
    return {
        "return_mean": mean_stat(returns, tokens),
        "return_square": mean_stat(returns.square(), tokens),
        "value_error_mean": mean_stat(error, tokens),
        "value_error_square": mean_stat(error.square(), tokens),
        "value_mean": mean_stat(old, tokens),
        "value_tokens": Stat(tokens.mask.sum(), reduce="sum"),
    }


def explained_variance(metrics: dict[str, float]) -> float:
    """1 − Var(returns − values) / Var(returns): 1 is perfect, 0 no better than a constant."""
    variance = metrics["return_square"] - metrics["return_mean"] ** 2
    unexplained = metrics["value_error_square"] - metrics["value_error_mean"] ** 2
    return 1.0 - unexplained / variance if variance > 1e-12 else 0.0
