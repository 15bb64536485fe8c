"""SimPO (Meng et al. 2024, arXiv:2405.14734): DPO without a reference; the implied reward is the mean log-probability.

Loss −log σ(β (mean log π(chosen) − mean log π(rejected)) − γ).
"""

from __future__ import annotations

from torch import Tensor

from tidemill.algorithms.preference import PairPolicy, logistic
from tidemill.recipe.config import Preference


class SimPO(PairPolicy):
    name = "simpo"
    about = "prefers by mean log-probability, with a margin and no reference"

    def pair_loss(self, chosen: Tensor, rejected: Tensor, settings: Preference) -> Tensor:
        return logistic(chosen, rejected, settings)
