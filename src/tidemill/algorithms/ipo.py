"""IPO (Azar et al. 2023, arXiv:2310.12036): like DPO, with a squared loss that does not run off on certain pairs.

h as in DPO but a mean over each response's tokens; loss (h − 1/(2β))².
"""

from __future__ import annotations

from tidemill.algorithms.shared.preference import PairPolicy
from tidemill.imports import torch
from tidemill.recipe.config import Preference


class IPO(PairPolicy):
    name = "ipo"
    about = "DPO with a squared loss around a fixed margin"
    paper = {"aggregation": "group_mean", "preference": {"beta": 0.1}}
    has_reference = True

    def pair_loss(self, chosen: torch.Tensor, rejected: torch.Tensor, settings: Preference) -> torch.Tensor:
        h = (chosen - rejected) / settings.beta
        return (h - 1.0 / (2.0 * settings.beta)).square()
