"""Whether a model can be learned from packed rows, tried with a few tokens before anything else is done with it.

A model that mixes tokens outside of its attention (state-space and linear-attention layers, convolutions, attention
of its own) would let one sample see another without any error, and every log-probability would be of nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tidemill.errors import ModelError
from tidemill.models import logits
from tidemill.models.attention.packed import Packed
from tidemill.models.attention.registry import plain
from tidemill.models.shape import unknown_layers

LENGTHS = (7, 5)  # of two samples
LOCAL = ("sliding_window", "attention_chunk_size")
FEW = 3  # tokens in a window or chunk while a model is tried
STRIDE = 7919  # between tried tokens, modulo the vocabulary
REMEDY = "docs/models.md lists models that can be"


def try_out(model: Any) -> None:
    """Two samples in one row must give the logits that transformers itself gives of each."""
    kind = type(model).__name__
    unknown = unknown_layers(model.config.get_text_config().to_dict())
    if unknown:
        raise ModelError(f"{kind} has layers of {unknown}, which cannot be learned from packed rows", REMEDY)
    samples = _samples(model)
    with _narrowed(model.config.get_text_config()):
        _compare(model, samples)


def _compare(model: Any, samples: list[Tensor]) -> None:
    kind = type(model).__name__
    try:
        ours = _packed(model, samples)
    except ModelError:
        raise
    except Exception as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{kind} cannot be learned from packed rows: {why}", REMEDY) from error
    try:
        theirs = _alone(model, samples)
    except Exception:  # nothing to compare with
        return
    if not torch.isfinite(theirs).all():
        raise ModelError(
            f"{kind}'s weights give numbers that are not finite{_not_finite(model)}",
            "the folder's weights are broken: copy them again, or take an earlier checkpoint",
        )
    first, second = _apart(ours, theirs)
    apart = max(first, second)
    # What leaks leaks into the second sample alone; the first has rounding in it, and a scale that is not known. 16-bit
    # rounding differs from token to token, and a sound model that is refused is the worse mistake.
    most, more = (0.01, 0.01) if ours.dtype == torch.float32 else (0.15, 0.05)
    if not (apart < most and second < 4 * first + more):
        raise ModelError(
            f"{kind} gives other logits of packed samples than of each alone (by {apart:.0%}): it mixes tokens outside "
            "of its attention, or changes logits in a way that is not known",
            REMEDY,
        )


def _not_finite(model: Any) -> str:
    """The first tensor with NaN or infinity in it."""
    bad = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    return f": {bad[0]} holds NaN or infinity, as do {len(bad) - 1} others" if bad else ""


def _samples(model: Any) -> list[Tensor]:
    words = model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(1, sum(LENGTHS) + 1, device=next(model.parameters()).device) * STRIDE % words
    return list(tokens.split(LENGTHS))


@torch.no_grad()
def _packed(model: Any, samples: list[Tensor]) -> Tensor:
    """(tokens, words), the way the learner goes."""
    device = samples[0].device
    positions = torch.cat([torch.arange(len(sample), device=device) for sample in samples])
    context = Packed([len(sample) for sample in samples], device)
    hidden = model.get_decoder()(
        input_ids=torch.cat(samples)[None], position_ids=positions[None], use_cache=False, tide=context
    ).last_hidden_state[0]
    return logits.of(model, hidden)


@contextmanager
def _narrowed(settings: Any) -> Iterator[None]:
    """Windows and chunks of so few tokens that they matter among those that are tried."""
    usual = {name: size for name in LOCAL if isinstance(size := getattr(settings, name, None), int)}
    for name in usual:
        setattr(settings, name, FEW)
    try:
        yield
    finally:
        for name, size in usual.items():
            setattr(settings, name, size)


@torch.no_grad()
def _alone(model: Any, samples: list[Tensor]) -> Tensor:
    with plain(model):
        return torch.cat([model(input_ids=sample[None], use_cache=False).logits[0] for sample in samples])


def _apart(ours: Tensor, theirs: Tensor) -> list[float]:
    """Of each sample, relative, its token in the middle: 16-bit rounding may send one token to another expert."""
    ours, theirs = (x.float() - x.float().mean(-1, keepdim=True) for x in (ours, theirs))
    gap = torch.linalg.vector_norm(ours - theirs, dim=-1) / torch.linalg.vector_norm(theirs, dim=-1).clamp(min=1e-6)
    return [float(part.median()) for part in gap.split(LENGTHS)]
