"""REINFORCE (Williams 1992): no critic, no groups, no ratio. Loss per decision −G log π.

G is the sum of rewards after the decision, brought to mean 0 and standard deviation 1 over the step (`critic.whiten:
false` leaves it as it is). Of an episode that goes on after a fragment only what was seen counts: fragments should be
as long as episodes, or γ small.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidemill.algorithms.api import Stats, TokenBatch
from tidemill.algorithms.reinforce_pp import ReinforcePP
from tidemill.algorithms.shared import steps
from tidemill.algorithms.shared.losses import RATIO_SETTINGS, finish
from tidemill.batch import Batch
from tidemill.graph import Graph
from tidemill.imports import torch
from tidemill.recipe.config import Config


class Reinforce(ReinforcePP):
    name = "reinforce"
    about = "plain policy gradient with what came after each decision"
    policies = ("network",)

    def unused(self, config: Config) -> dict[str, str]:
        return dict.fromkeys(RATIO_SETTINGS, "has no ratio: its loss is −G log π")

    def graph(self, config: Config) -> Graph:
        return steps.graph(self.name, config, returns=False)

    def advantages(self, batch: Batch, config: Config) -> Batch:
        to_go = steps.returns(batch, config.algorithm.critic.gamma, steps.scaled_rewards(batch))
        return Batch({"advantages": steps.column(steps.normalised(to_go, config), batch)})

    def closed_form(self, config: Config) -> Mapping[str, float] | None:
        return steps.closed_form(config, is_ratio=False)

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[torch.Tensor, Stats]:
        per_token = -tokens.made(tokens.advantages) * tokens.made(tokens.logprobs)
        return finish(per_token, tokens, config.algorithm, {})
