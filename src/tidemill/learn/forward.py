"""One call from a packed row to the log-probability and entropy of its targets, or their values: what FSDP wraps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tidemill.learn.logprob.tokens import token_logprobs
from tidemill.learn.logprob.vocabulary import vocabulary_logprobs
from tidemill.learn.parallel.collectives import MeshLink, gather_tokens
from tidemill.learn.parallel.cuts import Cuts
from tidemill.learn.parallel.pipeline import Stages
from tidemill.learn.parallel.tensor import first_word
from tidemill.learn.rows.packing import PackedBatch
from tidemill.learn.values.model import decoded, values_at
from tidemill.models import logits
from tidemill.models.layers import rowwise
from tidemill.recipe.config import Config

Scores = tuple[Tensor, Tensor]  # log-probability and entropy of every target; or values, and zeros


def forward(model: Any, packed: PackedBatch, config: Config) -> Scores:
    """Of a model that is whole: log-probability and entropy of every target, at the temperature that sampled it."""
    found: Scores = ForwardRoot(model, config)(packed)
    return found


class ForwardRoot(torch.nn.Module):
    """`over`: the ranks among which tokens and words are dealt out, if any. `stages`: this rank's, of a pipeline.
    `gathers`: FSDP gathers the head's weight when the head is called, and only then."""

    def __init__(
        self,
        model: Any,
        config: Config,
        cuts: Cuts | None = None,
        over: MeshLink | None = None,
        stages: Stages | None = None,
        gathers: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.over, self.config, self.stages = model, over, config, stages
        head = model.get_output_embeddings()
        self.gives_values = head is None
        weight = getattr(head, "weight", None)
        self.first, self.gathers = 0, gathers and weight is not None
        if over is not None and cuts is not None and weight is not None:
            names = {id(p): name for name, p in model.named_parameters()}
            self.first = first_word(cuts[names[id(weight)]], over)
        if self.gathers:
            head.forward = self._score  # scoring is the head's own forward pass

    def forward(self, packed: PackedBatch, stage: int | None = None, came: Tensor | None = None) -> Scores | Tensor:
        """Scores; of a pipeline's stage what goes to the next one, and scores after the last."""
        if self.gives_values:
            values = values_at(self.model, packed, self.over).clone()  # FSDP wants it to be nobody's view
            return values, torch.zeros_like(values)
        if stage is None or self.stages is None:
            with rowwise.mode(self.config.rollout.batch_invariant, packed.tokens.device):
                return self._scores(decoded(self.model, packed), packed)
        out = self.stages(stage, packed, came)
        return self._scores(out[0], packed) if stage == self.stages.last else out

    def _scores(self, hidden: Tensor, packed: PackedBatch) -> Scores:
        if not self.gathers:
            return self._score(hidden, packed)
        found: Scores = self.model.get_output_embeddings()(hidden, packed)
        return found

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
