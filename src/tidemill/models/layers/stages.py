"""A model cut into runs of layers: which rank has which, and what it leaves out of a whole model."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Module

from tidemill.errors import ModelError
from tidemill.models.parts import decoder_of, layers_of


class Elsewhere(Module):
    """In the place of a layer that another rank has: hands on what it gets. So names and numbers of layers stay."""

    def __init__(self, kind: str | None = None) -> None:
        super().__init__()
        self.layer_type = kind

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def stage_of(layer: int, layers: int, stages: int) -> int:
    """Layers in even runs."""
    return layer * stages // layers


def here(model: Any) -> list[tuple[int, Any]]:
    """The layers that this rank has, and their numbers."""
    layers = enumerate(layers_of(model))
    return [(i, layer) for i, layer in layers if not isinstance(layer, Elsewhere)]


def split(model: Any, rank: int, ranks: int, chunks: int = 1) -> None:
    """Drop what this rank does not need of a whole model."""
    decoder = decoder_of(model)
    layers, stages = len(decoder.layers), ranks * chunks
    _check(model, layers, stages)
    is_first, is_last = rank == 0, rank == ranks - 1
    for i, layer in enumerate(decoder.layers):
        if stage_of(i, layers, stages) % ranks != rank:
            decoder.layers[i] = Elsewhere(getattr(layer, "layer_type", None))
    tied = is_tied(model)  # the last rank keeps its copy under the embedding's name, as a whole model has it
    if not is_first and not (is_last and tied):
        model.set_input_embeddings(Elsewhere())
    if not is_last:
        setattr(decoder, norm_name(decoder), Elsewhere())
        model.set_output_embeddings(Elsewhere())


def is_tied(model: Any) -> bool:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return getattr(head, "weight", None) is not None and head.weight is getattr(embedding, "weight", None)


def _check(model: Any, layers: int, stages: int) -> None:
    name, settings = type(model).__name__, model.config.get_text_config()
    if stages > layers:
        raise ModelError(f"{name} has {layers} layers, fewer than {stages} stages", f"at most {layers} stages would do")
    if getattr(settings, "embedding_multiplier", None) not in (None, 1.0):
        raise ModelError(f"{name} scales its inputs in the decoder itself: it cannot be cut into stages", "use pp: 1")
    norm_name(decoder_of(model))


def norm_name(decoder: Any) -> str:
    """Of the one thing that comes after the layers."""
    inputs = decoder.get_input_embeddings()
    found: list[str] = [
        name
        for name, child in decoder.named_children()
        if name != "layers"
        and child is not inputs
        and (isinstance(child, Elsewhere) or any(True for _ in child.parameters()))
    ]
    if len(found) != 1:
        raise ModelError(
            f"{type(decoder).__name__} has {', '.join(found) or 'nothing'} beside its layers and embedding, where "
            "pipeline stages expect a final norm alone",
            "use pp: 1",
        )
    return found[0]
