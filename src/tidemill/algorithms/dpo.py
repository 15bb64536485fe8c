"""DPO (Rafailov et al. 2023, arXiv:2305.18290): prefer chosen over rejected responses, measured against a reference.

h = (log π − log π_ref)(chosen) − (log π − log π_ref)(rejected), summed over tokens; loss −log σ(β h), with label
smoothing ε: −(1 − ε) log σ(β h) − ε log σ(−β h).
"""

from __future__ import annotations

from tidemill.algorithms.shared.preference import PairPolicy, logistic
from tidemill.imports import torch
from tidemill.recipe.config import Preference


class DPO(PairPolicy):
    name = "dpo"
    about = "prefers chosen over rejected responses, against a reference"
    paper = {"aggregation": "group_mean", "preference": {"beta": 0.1}}
    has_reference = True
    per_token = False

    def pair_loss(self, chosen: torch.Tensor, rejected: torch.Tensor, settings: Preference) -> torch.Tensor:
        return logistic(chosen, rejected, settings)
