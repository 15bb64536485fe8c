"""REINFORCE++ with a baseline (Hu et al. 2025, arXiv:2501.03262): the reward less its group's mean, normalised over the
tokens of the whole step."""

from __future__ import annotations

import numpy as np

from tidemill.algorithms.reinforce_pp import ReinforcePP, normalised
from tidemill.algorithms.shared.advantages import group_advantages
from tidemill.algorithms.shared.shaping import sample_rewards, token_rows
from tidemill.batch import GROUP, Batch
from tidemill.recipe.config import Config


class ReinforcePPBaseline(ReinforcePP):
    name = "reinforce_pp_baseline"
    about = "reward less its group's mean, normalised over the whole step, clipped ratio"
    paper = {"aggregation": "token_mean", "baseline": "mean", "advantage_scale": "batch_std"}
    compares_samples = True

    def advantages(self, batch: Batch, config: Config) -> Batch:
        settings = config.algorithm
        centred = group_advantages(
            sample_rewards(batch, config),
            batch.values(GROUP),
            baseline=settings.baseline,
            scale="none",
            group_of_one=settings.group_of_one,
        )
        return normalised(batch, centred.astype(np.float64)[token_rows(batch)], config)
