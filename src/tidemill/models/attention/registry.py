"""One registry of attention by device, plugged into transformers models through its AttentionInterface.

A forward call carries an attention *context* (packed sequences to learn from, or a paged cache to decode with) as the
keyword `tide`; transformers hands it down to `attend`, which gives it the layer's projections. So one module definition
serves rollout and learning. Models that hand no keywords down find the context by `serving`: whoever calls a model does
so inside `serve`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from tidemill.errors import ModelError

NAME = "tidemill"
HARMLESS = frozenset({"position_ids", "cache_position"})  # tensors that models hand down, and no attention uses


class AttentionForm(NamedTuple):
    """What a layer's attention is besides softmax(q kᵀ) v."""

    scale: float
    window: int | None = None  # a token sees so many, itself included
    softcap: float | None = None  # scores are bounded by it
    chunk: int | None = None  # a token sees those of its own chunk of so many positions, the first from 0
    sinks: Tensor | None = None  # (heads,) a score beside the others, whose share of the softmax goes nowhere


class Context(Protocol):
    """Knows how the tokens of one forward pass may see each other.

    One with `is_traced` true can be part of a compiled layer: its `attend` is tensor operations alone, with nothing a
    compiler would have to look at anew for each layer or batch.
    """

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
        """q (tokens, heads, dim), k and v (tokens, kv_heads, dim) → (tokens, heads, v_dim). `layer` tells the calls of
        a pass apart, of which all passes of a model have the same; None: the one after the call before. Modules cannot
        say it, because some are called several times in a pass."""


_SERVING: ContextVar[Context | None] = ContextVar("tide", default=None)


@contextmanager
def serve(context: Context | None) -> Iterator[None]:
    """Inside, `context` is that of the forward pass."""
    before = _SERVING.set(context)
    try:
        yield
    finally:
        _SERVING.reset(before)


def serving(given: Mapping[str, Any]) -> Context | None:
    """The context of the forward pass under way: as a call was given it, or else as `serve` says. None: not ours."""
    found: Context | None = given.get("tide")
    return _SERVING.get() if found is None else found


def serve_again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For `torch.utils.checkpoint`: around a layer, and around the same when it is computed again."""
    return nullcontext(), serve(_SERVING.get())


def attend(
    module: Any,  # an attention layer of a transformers model
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LocalMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    tide: Context | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: q, k, v are (1, heads, tokens, dim); gives (1, tokens, heads, dim)."""
    for name, other in others.items():
        if isinstance(other, Tensor) and name not in HARMLESS:
            kind = type(module).__name__
            raise ModelError(f"{kind} gives its attention {name}, which is not known", "see docs/models.md")
    tide = _SERVING.get() if tide is None else tide
    if tide is None:
        raise RuntimeError("attention 'tidemill' needs its context: call the model inside `serve`")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    chunk = None
    if isinstance(attention_mask, LocalMask):
        sliding_window, chunk = attention_mask.window, attention_mask.chunk
    elif attention_mask is not None:
        raise ModelError(f"{type(module).__name__} has a mask of its own, which is not known", "see docs/models.md")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = tide.attend(None, q, k, v, AttentionForm(scale, sliding_window, softcap, chunk, s_aux))
    return out.unsqueeze(0), None


def is_traced(tide: Context | None) -> bool:
    return getattr(tide, "is_traced", False)


def attention_window(attention: Any) -> int | None:
    """What the module would hand to the attention function: Llama none, Mistral the config's, Qwen by layer type."""
    if hasattr(attention, "sliding_window"):
        return cast(int | None, attention.sliding_window)
    by_config = type(attention).__name__ in ("MistralAttention", "MixtralAttention")
    return getattr(attention.config, "sliding_window", None) if by_config else None


@dataclass(frozen=True, slots=True)
class LocalMask:
    """Stands where transformers would have put a mask, and says what a context cannot know: that a layer sees a part of
    its own sequence alone."""

    window: int | None = None
    chunk: int | None = None


def local_mask(*_: Any, config: Any = None, local_size: int | None = None, **__: Any) -> LocalMask | None:
    """The context knows who sees whom; transformers need not build a mask."""
    if local_size is None:
        return None
    if getattr(config, "attention_chunk_size", None) == local_size and not getattr(config, "sliding_window", None):
        return LocalMask(chunk=local_size)
    return LocalMask(window=local_size)


TOWER = "sdpa"  # torch's own: the tiles of a tower are a dense batch, and need no context


def ours(config: Any) -> Any:
    """What transformers is told as `attn_implementation` of a model with this config: ours for its decoder."""
    if getattr(config, "vision_config", None) is None:
        return NAME
    return {"text_config": NAME, "vision_config": TOWER}


def plugged(config: Any, make: Callable[[Any], Any]) -> Any:
    """The model of this config that `make` gives with the `attn_implementation` it is given: ours, or, of classes that
    know none but their own, that."""
    try:
        return make(ours(config))
    except KeyError as error:
        if NAME not in error.args:
            raise
        return make("eager")


def set_attention(model: Any, kind: Any) -> None:
    """Also of models that know of no other attention than their own, which transformers would warn of."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(kind)
    if isinstance(kind, str):
        model.config._attn_implementation = kind


def attention_of(model: Any) -> Any:
    """What `set_attention` would be given to make it as it is: one for each part of the model."""
    config = model.config
    parts = {name: part for name in config.sub_configs if (part := getattr(config, name, None)) is not None}
    chosen = {name: part._attn_implementation for name, part in {"": config, **parts}.items()}
    return chosen if parts else chosen[""]


def is_dense(model: Any) -> bool:
    """Whether the model's attention is its own, so that it reads whole samples in dense batches."""
    return str(model.config.get_text_config()._attn_implementation) != NAME


@contextmanager
def plain(model: Any) -> Iterator[None]:
    """Inside, the model's attention is transformers' own."""
    usual = attention_of(model)
    set_attention(model, "eager")
    try:
        yield
    finally:
        set_attention(model, usual)


def register() -> None:
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, local_mask)


register()
