"""REINFORCE++ with a baseline (Hu et al. 2025, arXiv:2501.03262): the reward less its group's mean, normalised over the
tokens of the whole step."""

from __future__ import annotations

from tidemill.algorithms.reinforce_pp import ReinforcePP, normalised
from tidemill.algorithms.shared import credit
from tidemill.batch import Batch
from tidemill.recipe.config import Config


class ReinforcePPBaseline(ReinforcePP):
    name = "reinforce_pp_baseline"
    about = "reward less its group's mean, normalised over the whole step, clipped ratio"
    paper = {"aggregation": "token_mean", "baseline": "mean", "advantage_scale": "batch_std"}
    compares_samples = True

    def advantages(self, batch: Batch, config: Config) -> Batch:
        centred = credit.compared(batch, config, scale="none")
        return normalised(batch, credit.per_token(centred, batch), config)
