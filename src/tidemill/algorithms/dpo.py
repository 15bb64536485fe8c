"""DPO (Rafailov et al. 2023, arXiv:2305.18290): prefer chosen over rejected responses, measured against a reference.

h = (log π − log π_ref)(chosen) − (log π − log π_ref)(rejected), summed over tokens; loss −log σ(β h), with label
smoothing ε: −(1 − ε) log σ(β h) − ε log σ(−β h).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tidemill.algorithms import preference
from tidemill.algorithms.api import Algorithm, Stats, TokenBatch
from tidemill.batch import Batch
from tidemill.config import Config
from tidemill.graph import Graph


class DPO(Algorithm):
    name = "dpo"
    about = "prefers chosen over rejected responses, against a reference"
    food = "pairs"

    def graph(self, config: Config) -> Graph:
        return preference.graph(self.name, needs_reference=True)

    def advantages(self, batch: Batch, config: Config) -> Batch:
        return Batch({})

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[Tensor, Stats]:
        settings = config.algorithm.preference
        assert tokens.ref_logprobs is not None
        pairs = preference.pairs_of(tokens)
        logprobs = preference.row_sums(tokens.logprobs, tokens)
        reward = settings.beta * (logprobs - preference.row_sums(tokens.ref_logprobs, tokens))
        chosen, rejected = reward[pairs.chosen], reward[pairs.rejected]
        h = chosen - rejected - settings.margin
        smoothing = settings.label_smoothing
        per_pair = -(1.0 - smoothing) * F.logsigmoid(h) - smoothing * F.logsigmoid(-h)
        if settings.sft_coef:
            per_pair = per_pair - settings.sft_coef * preference.row_means(tokens.logprobs, tokens)[pairs.chosen]
        return (pairs.weight * per_pair).sum(), preference.pair_stats(chosen, rejected, logprobs, pairs)
