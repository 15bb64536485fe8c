"""A2C (Mnih et al. 2016, arXiv:1602.01783, its synchronous form): the policy's gradient with a critic, no ratio.

Loss per decision −A log π; advantages, returns and critic as PPO's. A sample is learned from once, by the policy that
made it.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidemill.algorithms.api import Stats, TokenBatch
from tidemill.algorithms.ppo import PPO
from tidemill.algorithms.shared import steps
from tidemill.algorithms.shared.losses import RATIO_SETTINGS, finish
from tidemill.imports import torch
from tidemill.recipe.config import Config


class A2C(PPO):
    name = "a2c"
    about = "critic and plain policy gradient, one update a step"
    policies = ("network",)
    paper = {"aggregation": "token_mean", "critic": {"lam": 1.0, "whiten": False, "value_clip": None}}

    def unused(self, config: Config) -> dict[str, str]:
        return dict.fromkeys(RATIO_SETTINGS, "has no ratio: its loss is −A log π")

    def closed_form(self, config: Config) -> Mapping[str, float] | None:
        return steps.closed_form(config, is_ratio=False)

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[torch.Tensor, Stats]:
        per_token = -tokens.made(tokens.advantages) * tokens.made(tokens.logprobs)
        loss, stats = finish(per_token, tokens, config.algorithm, {})
        return steps.with_critic(self, loss, stats, tokens, config)
