"""SimPO (Meng et al. 2024, arXiv:2405.14734): DPO without a reference; the implied reward is the mean log-probability.

Loss −log σ(β (mean log π(chosen) − mean log π(rejected)) − γ).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tidemill.algorithms import preference
from tidemill.algorithms.api import Algorithm, Stats, TokenBatch
from tidemill.batch import Batch
from tidemill.config import Config
from tidemill.graph import Graph


class SimPO(Algorithm):
    name = "simpo"
    about = "prefers by mean log-probability, with a margin and no reference"
    food = "pairs"

    def graph(self, config: Config) -> Graph:
        return preference.graph(self.name, needs_reference=False)

    def advantages(self, batch: Batch, config: Config) -> Batch:
        return Batch({})

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[Tensor, Stats]:
        settings = config.algorithm.preference
        pairs = preference.pairs_of(tokens)
        logprobs = preference.row_means(tokens.logprobs, tokens)
        reward = settings.beta * logprobs
        chosen, rejected = reward[pairs.chosen], reward[pairs.rejected]
        h = chosen - rejected - settings.margin
        smoothing = settings.label_smoothing
        per_pair = -(1.0 - smoothing) * F.logsigmoid(h) - smoothing * F.logsigmoid(-h)
        if settings.sft_coef:
            per_pair = per_pair - settings.sft_coef * logprobs[pairs.chosen]
        return (pairs.weight * per_pair).sum(), preference.pair_stats(chosen, rejected, logprobs, pairs)
