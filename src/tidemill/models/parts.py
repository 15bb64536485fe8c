"""The parts of any transformers model that learning and rollout ask for: its decoder and the decoder's layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from tidemill.errors import ModelError
from tidemill.models.policy import Policy


def decoder_of(model: Any) -> Any:
    """The module from token ids to hidden states: what transformers calls the decoder, where it is one, or else the
    model without its head."""
    for found in _candidates(model):
        if isinstance(found, nn.Module) and found is not model and _embeds(found, model):
            return found
    raise ModelError(f"{type(model).__name__} has no decoder that is apart from its head", "see docs/models.md")


def _candidates(model: Any) -> Iterator[Any]:
    if hasattr(model, "get_decoder"):
        yield model.get_decoder()
    yield getattr(model, "base_model", None)
    yield from model.children()


def _embeds(decoder: Any, model: Any) -> bool:
    """Whether it turns token ids into vectors itself, with the model's own embedding."""
    if not hasattr(decoder, "get_input_embeddings"):
        return False
    return decoder.get_input_embeddings() is model.get_input_embeddings()


def layers_of(model: Any) -> Any:
    """The decoder's layers: by their usual name, or else the longest list of modules in it."""
    if isinstance(model, Policy):
        return nn.ModuleList()  # a small network has no layers that are alike
    decoder = decoder_of(model)
    found = getattr(decoder, "layers", None)
    if isinstance(found, nn.ModuleList):
        return found
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ModelError(f"{type(decoder).__name__} has no list of layers", "see docs/models.md")
    return max(lists, key=lambda one: sum(p.numel() for p in one.parameters()))
