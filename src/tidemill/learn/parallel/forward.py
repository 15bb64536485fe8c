"""What FSDP wraps: one call from a packed row to the log-probability and entropy of its targets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tidemill.config import Config
from tidemill.learn.engine import Scores
from tidemill.learn.logprob import token_logprobs
from tidemill.learn.packing import PackedBatch
from tidemill.learn.parallel.collectives import Link, gather_tokens
from tidemill.learn.parallel.cuts import Cuts
from tidemill.learn.parallel.tensor import first_word
from tidemill.learn.parallel.vocabulary import vocabulary_logprobs


class Root(torch.nn.Module):
    """`over`: the ranks among which tokens and words are dealt out, if any."""

    def __init__(self, model: Any, cuts: Cuts, over: Link | None, config: Config) -> None:
        super().__init__()
        self.model, self.over, self.config = model, over, config
        head = model.get_output_embeddings()
        names = {id(p): name for name, p in model.named_parameters()}
        self.first = first_word(cuts[names[id(head.weight)]], over) if over is not None else 0

    def forward(self, packed: PackedBatch) -> Scores:
        return self.scores(self.hidden(packed), packed)

    def hidden(self, packed: PackedBatch) -> Tensor:
        """(tokens, width), or this rank's tokens of it."""
        out: Tensor = self.model.get_decoder()(
            input_ids=packed.tokens[None], position_ids=packed.positions[None], use_cache=False, tide=packed.context
        ).last_hidden_state[0]
        return out

    def scores(self, hidden: Tensor, packed: PackedBatch) -> Scores:
        head = self.model.get_output_embeddings()
        settings: dict[str, Any] = {
            "temperature": self.config.rollout.temperature or 1.0,
            "softcap": getattr(self.model.config.get_text_config(), "final_logit_softcapping", None),
            "bias": getattr(head, "bias", None),
            "chunk": self.config.learn.logprob_chunk,
        }
        if self.over is None:
            return token_logprobs(hidden.index_select(0, packed.predicts), head.weight, packed.targets, **settings)
        chosen = gather_tokens(hidden, self.over).index_select(0, packed.predicts)
        return vocabulary_logprobs(chosen, head.weight, packed.targets, self.first, self.over, **settings)
