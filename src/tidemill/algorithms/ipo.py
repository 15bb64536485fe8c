"""IPO (Azar et al. 2023, arXiv:2310.12036): like DPO, with a squared loss that does not run off on certain pairs.

h as in DPO but a mean over each response's tokens; loss (h − 1/(2β))².
"""

from __future__ import annotations

from torch import Tensor

from tidemill.algorithms import preference
from tidemill.algorithms.api import Algorithm, Stats, TokenBatch
from tidemill.batch import Batch
from tidemill.config import Config
from tidemill.graph import Graph


class IPO(Algorithm):
    name = "ipo"
    about = "DPO with a squared loss around a fixed margin"
    food = "pairs"

    def graph(self, config: Config) -> Graph:
        return preference.graph(self.name, needs_reference=True)

    def advantages(self, batch: Batch, config: Config) -> Batch:
        return Batch({})

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[Tensor, Stats]:
        settings = config.algorithm.preference
        assert tokens.ref_logprobs is not None
        pairs = preference.pairs_of(tokens)
        logprobs = preference.row_means(tokens.logprobs, tokens)
        ratio = logprobs - preference.row_means(tokens.ref_logprobs, tokens)
        chosen, rejected = ratio[pairs.chosen], ratio[pairs.rejected]
        per_pair = (chosen - rejected - 1.0 / (2.0 * settings.beta)).square()
        stats = preference.pair_stats(settings.beta * chosen, settings.beta * rejected, logprobs, pairs)
        return (pairs.weight * per_pair).sum(), stats
