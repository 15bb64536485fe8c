"""KTO (Ethayarajh et al. 2024, arXiv:2402.01306): learn from single responses judged good or bad, no pairs.

h = log π − log π_ref of the response; z = max(0, mean h over mismatched prompts and responses), a constant.
Loss λ_good (1 − σ(β (h − z))) for good ones, λ_bad (1 − σ(β (z − h))) for bad ones.

Mismatched rows (a prompt with the response of another) enter with the column `mismatched` at 1; the stage
`advantage` takes z from them, writes it into `advantages`, and drops them.
"""

from __future__ import annotations

import numpy as np

from tidemill.algorithms.api import Algorithm, Kept, Stat, Stats, TokenBatch, segment_sum
from tidemill.algorithms.shared import preference, tables
from tidemill.batch import GROUP, ID, Batch
from tidemill.graph import Graph, Stage
from tidemill.imports import torch
from tidemill.recipe.config import Config

JUDGED = (*tables.OFFLINE, "chosen", "mismatched")


class KTO(Algorithm):
    name = "kto"
    about = "learns from single responses judged good or bad"
    paper = {"aggregation": "sample_mean", "old_logprobs": "recompute", "preference": {"beta": 0.1}}
    input_kind = "judged"

    def graph(self, config: Config) -> Graph:
        advantage_reads = (ID, GROUP, "mask", "old_logprobs", "ref_logprobs", "mismatched")
        learn_reads = (*JUDGED[:-1], "ref_logprobs", "advantages")
        stages = (
            tables.old_logprobs(),
            tables.reference(),
            Stage("advantage", "reward", advantage_reads, ("advantages",), "group"),
            Stage("learn", "actor", learn_reads, scope="group"),
        )
        return Graph(self.name, JUDGED, stages)

    def wants_whole_step(self, config: Config) -> bool:
        return True

    def advantages(self, batch: Batch, config: Config) -> Batch:
        row = np.repeat(np.arange(batch.rows), batch["mask"].lengths)
        gap = batch.values("old_logprobs").astype(np.float64) - batch.values("ref_logprobs")
        h = np.bincount(row, weights=np.where(batch.values("mask") != 0, gap, 0.0), minlength=batch.rows)
        mismatched = batch.values("mismatched") != 0
        z = max(0.0, float(h[mismatched].mean())) if mismatched.any() else 0.0
        return Batch({"advantages": np.full(batch.rows, z, np.float32)})

    def keep(self, batch: Batch, config: Config) -> Kept:
        return np.asarray(batch.values("mismatched") == 0, np.bool_)

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[torch.Tensor, Stats]:
        settings = config.algorithm.preference
        assert tokens.ref_logprobs is not None
        h = preference.row_sums(tokens.logprobs - tokens.ref_logprobs, tokens)
        z = preference.row_values(tokens.advantages, tokens)
        good = preference.row_values(tokens.columns["chosen"], tokens) > 0.5
        sign = torch.where(good, 1.0, -1.0).to(h.dtype)
        factor = torch.where(good, settings.good_weight, settings.bad_weight).to(h.dtype)
        per_row = factor * (1.0 - torch.sigmoid(settings.beta * sign * (h - z)))
        weight = segment_sum(tokens.weights, tokens.row, tokens.rows)
        return (weight * per_row).sum(), judged_stats(settings.beta * h.detach(), z, good)


def judged_stats(reward: torch.Tensor, z: torch.Tensor, good: torch.Tensor) -> Stats:
    goods, bads = good.to(reward.dtype), (~good).to(reward.dtype)
    return {
        "chosen_reward": Stat((reward * goods).sum(), goods.sum()),
        "rejected_reward": Stat((reward * bads).sum(), bads.sum()),
        "kl": Stat(z.sum(), float(len(z))),
    }
