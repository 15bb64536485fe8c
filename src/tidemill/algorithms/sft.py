"""Supervised fine-tuning: raise the log-probability of given responses. One stage; only response tokens count."""

from __future__ import annotations

from torch import Tensor

from tidemill.algorithms.api import Stat, Stats, TokenBatch
from tidemill.batch import Batch
from tidemill.config import Config
from tidemill.graph import Graph, Stage

SOURCE = ("id", "group", "length", "tokens", "prompt_length", "mask")


class SFT:
    name = "sft"
    about = "supervised fine-tuning on prompts with given responses"

    def graph(self, config: Config) -> Graph:
        return Graph(self.name, SOURCE, (Stage("learn", "actor", SOURCE, scope="group"),))

    def advantages(self, batch: Batch, config: Config) -> Batch:
        raise TypeError("supervised fine-tuning has no advantages")

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[Tensor, Stats]:
        count = tokens.mask.sum()
        stats = {"nll": Stat((-tokens.logprobs.detach() * tokens.mask).sum(), count)}
        if tokens.entropy is not None:
            stats["entropy"] = Stat((tokens.entropy.detach() * tokens.mask).sum(), count)
        return -(tokens.weights * tokens.logprobs).sum(), stats
