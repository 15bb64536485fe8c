"""Supervised fine-tuning: imitate given responses. Loss −log π over response tokens only."""

from __future__ import annotations

from tidemill.algorithms.api import Algorithm, Stats, TokenBatch
from tidemill.algorithms.shared import tables
from tidemill.algorithms.shared.losses import mean_stat
from tidemill.batch import Batch
from tidemill.graph import Graph, Stage
from tidemill.imports import torch
from tidemill.recipe.config import Config


class SFT(Algorithm):
    name = "sft"
    about = "imitates given responses"
    paper = {"aggregation": "token_mean"}
    input_kind = "responses"

    def graph(self, config: Config) -> Graph:
        return Graph(self.name, tables.OFFLINE, (Stage("learn", "actor", tables.OFFLINE, scope="group"),))

    def advantages(self, batch: Batch, config: Config) -> Batch:
        return Batch({})

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[torch.Tensor, Stats]:
        stats: Stats = {"nll": mean_stat(-tokens.logprobs, tokens)}
        if tokens.entropy is not None:
            stats["entropy"] = mean_stat(torch.as_tensor(tokens.entropy), tokens)
        return -tokens.weighted(tokens.logprobs), stats
