"""Value models: a decoder with one number per token in the place of words. A critic of PPO, or a reward model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from tidemill.learn.parallel.collectives import MeshLink, copy_tokens
from tidemill.learn.rows.packing import PackedBatch
from tidemill.models.calling import hidden_states
from tidemill.models.parts import decoder_of
from tidemill.models.vision.eyes import eyes


class ValueModel(torch.nn.Module):
    """The policy's decoder, copied, and a head that starts at 0 everywhere.

    With a shared trunk the decoder is the policy's own: the head alone is learned, from states it does not change, and
    no second model is kept.
    """

    def __init__(self, policy: Any, shares_trunk: bool = False) -> None:
        super().__init__()
        self.config, self.shares_trunk = policy.config, shares_trunk
        decoder = decoder_of(policy)
        if shares_trunk:
            self._shared = (decoder,)  # in a tuple, so that its parameters are not this model's
        else:
            self.decoder = copy.deepcopy(decoder).requires_grad_(True)
        width = policy.get_output_embeddings().weight.shape[1]
        self.head = torch.nn.Linear(width, 1).to(next(policy.parameters()))
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def get_decoder(self) -> Any:
        return self._shared[0] if self.shares_trunk else self.decoder

    def states(self, packed: PackedBatch, over: MeshLink | None = None) -> Tensor:
        """(targets, width) the decoder's states in which each response token is chosen. `over`: the ranks among which
        tokens are dealt out, if any."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.shares_trunk):
            hidden = decoded(self, packed)
            if over is not None:  # every rank computes all values, so none adds to another's gradient
                hidden = copy_tokens(hidden, over)
            return hidden.index_select(0, packed.predicts)

    def starts_from_nothing(self) -> list[torch.nn.Module]:
        """What low-rank adapters cannot stand in for."""
        return [self.head]

    def get_input_embeddings(self) -> Any:
        return self.get_decoder().get_input_embeddings()

    def get_output_embeddings(self) -> None:
        """There are no words to give."""

    def gradient_checkpointing_enable(self, settings: dict[str, Any]) -> None:
        self.decoder.gradient_checkpointing_enable(settings)


def decoded(model: Any, packed: PackedBatch) -> Tensor:
    """(tokens, width) of any model's decoder, or this rank's tokens of it."""
    return hidden_states(model, packed.context, **decoder_inputs(model, packed))


def decoder_inputs(model: Any, packed: PackedBatch) -> dict[str, Any]:
    """What the decoder is called with: tokens, or, of a model that looks, embeddings with features among them."""
    looks = eyes.of(model)
    if looks is None:
        return {"input_ids": packed.tokens[None], "position_ids": packed.positions[None]}
    look = packed.look
    seen = None if look is None else eyes.see(looks, look.tiles, look.at, look.which)
    return looks.inputs(packed.tokens, packed.positions, seen)


def values_at(model: ValueModel, packed: PackedBatch, over: MeshLink | None = None) -> Tensor:
    """(targets,) the value of the state in which each response token is chosen.

    The last token of a sample is never an input, for nothing follows it. So a reward model judges where the end token
    is about to come: it has seen the whole response but for that token.
    """
    values: Tensor = model.head(model.states(packed, over))[:, 0].float()
    return values
