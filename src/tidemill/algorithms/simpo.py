"""SimPO (Meng et al. 2024, arXiv:2405.14734): DPO without a reference; the implied reward is the mean log-probability.

Loss −log σ(β (mean log π(chosen) − mean log π(rejected)) − γ).
"""

from __future__ import annotations

from tidemill.algorithms.shared.preference import PairPolicy, logistic
from tidemill.imports import torch
from tidemill.recipe.config import Preference


class SimPO(PairPolicy):
    name = "simpo"
    about = "prefers by mean log-probability, with a margin and no reference"
    paper = {"aggregation": "group_mean", "preference": {"beta": 2.0, "margin": 1.0}}

    def pair_loss(self, chosen: torch.Tensor, rejected: torch.Tensor, settings: Preference) -> torch.Tensor:
        return logistic(chosen, rejected, settings)
