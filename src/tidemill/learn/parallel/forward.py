"""What FSDP wraps: one call from a packed row to the log-probability and entropy of its targets, or their values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tidemill.learn.critic import ValueModel
from tidemill.learn.engine import Scores
from tidemill.learn.logprob import token_logprobs
from tidemill.learn.packing import PackedBatch
from tidemill.learn.parallel.collectives import MeshLink, copy_tokens, gather_tokens
from tidemill.learn.parallel.cuts import Cuts
from tidemill.learn.parallel.pipeline import Stages
from tidemill.learn.parallel.tensor import first_word
from tidemill.learn.parallel.vocabulary import vocabulary_logprobs
from tidemill.models import logits
from tidemill.recipe.config import Config


class ForwardRoot(torch.nn.Module):
    """`over`: the ranks among which tokens and words are dealt out, if any. `stages`: this rank's, of a pipeline."""

    def __init__(
        self, model: Any, cuts: Cuts, over: MeshLink | None, config: Config, stages: Stages | None = None
    ) -> None:
        super().__init__()
        self.model, self.over, self.config, self.stages = model, over, config, stages
        weight = getattr(model.get_output_embeddings(), "weight", None)
        names = {id(p): name for name, p in model.named_parameters()}
        self.first = 0 if over is None or weight is None else first_word(cuts[names[id(weight)]], over)
        if weight is not None:
            # Scoring is the head's own forward pass: FSDP gathers its weight when it is called, and only then.
            model.get_output_embeddings().forward = self._score

    def forward(self, packed: PackedBatch, stage: int | None = None, came: Tensor | None = None) -> Scores | Tensor:
        """Scores; of a pipeline's stage what goes to the next one, and scores after the last."""
        if stage is None or self.stages is None:
            return self.scores(self.hidden(packed), packed)
        out = self.stages(stage, packed, came)
        return self.scores(out[0], packed) if stage == self.stages.last else out

    def hidden(self, packed: PackedBatch) -> Tensor:
        """(tokens, width), or this rank's tokens of it."""
        out: Tensor = self.model.get_decoder()(
            input_ids=packed.tokens[None], position_ids=packed.positions[None], use_cache=False, tide=packed.context
        ).last_hidden_state[0]
        return out

    def scores(self, hidden: Tensor, packed: PackedBatch) -> Scores:
        if isinstance(self.model, ValueModel):
            values = self._values(hidden, packed)
            return values, torch.zeros_like(values)
        found: Scores = self.model.get_output_embeddings()(hidden, packed)
        return found

    def _values(self, hidden: Tensor, packed: PackedBatch) -> Tensor:
        """As `critic.values_at`. Every rank computes all of them, so none adds to another's gradient."""
        if self.over is not None:
            hidden = copy_tokens(hidden, self.over)
        values: Tensor = self.model.head(hidden.index_select(0, packed.predicts))[:, 0].float().clone()
        return values

    def _score(self, hidden: Tensor, packed: PackedBatch) -> Scores:
        head = self.model.get_output_embeddings()
        settings: dict[str, Any] = {
            **logits.shape(self.model, self.config.rollout.temperature),
            "bias": getattr(head, "bias", None),
            "chunk": self.config.learn.logprob_chunk,
        }
        if self.over is None:
            return token_logprobs(hidden.index_select(0, packed.predicts), head.weight, packed.targets, **settings)
        chosen = gather_tokens(hidden, self.over).index_select(0, packed.predicts)
        return vocabulary_logprobs(chosen, head.weight, packed.targets, self.first, self.over, **settings)
