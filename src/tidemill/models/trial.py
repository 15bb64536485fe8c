"""Whether a model can be learned from packed rows, tried with a few tokens before anything else is done with it.

A model that mixes tokens outside of what is known of it (attention of its own, masks, positions that it counts itself)
would let one sample see another without any error, and every log-probability would be of nothing. Such a model is
computed densely: whole samples through transformers' own attention. What is wrong even then is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tidemill.errors import ModelError
from tidemill.models import logits
from tidemill.models.attention.contexts import choose
from tidemill.models.attention.registry import Context, is_dense, plain, set_attention
from tidemill.models.calling import hidden_states
from tidemill.models.parts import decoder_of

log = logging.getLogger(__name__)

LENGTHS = (7, 5)  # of two samples
SHARED = 4  # tokens of the first that another one continues, with as many as it has of its own
LOCAL = ("sliding_window", "attention_chunk_size")
FEW = 3  # tokens in a window or chunk while a model is tried
STRIDE = 7919  # between tried tokens, modulo the vocabulary
MOST_OF_HEAD = 0.05  # by which logits of one head may differ, relative
REMEDY = "docs/models.md lists models that can be"


class _NotFinite(ModelError):
    """Weights that no way of computing helps."""


def try_out(model: Any) -> None:
    """Samples in one row must give the logits that transformers itself gives of each; a model with which they do not is
    computed densely from here on, if that helps."""
    samples = _samples(model)
    try:
        with _narrowed(model.config.get_text_config()):
            _compare(model, samples)
        return
    except _NotFinite:
        raise
    except ModelError as error:
        if is_dense(model):
            raise
        refusal = error
    usual = model.config._attn_implementation
    set_attention(model, "sdpa" if model._supports_sdpa else "eager")
    try:
        _compare(model, samples)
    except ModelError as error:
        is_head = not _has_known_head(model, samples[0])
        set_attention(model, usual)
        if is_head:
            raise ModelError(
                f"{type(model).__name__} makes logits of hidden states in a way that is not known", REMEDY
            ) from error
        raise refusal from error
    log.info("%s is computed densely: %s", type(model).__name__, refusal.args[0])


def _compare(model: Any, samples: list[Tensor]) -> None:
    """Two samples by themselves, and one that shares its first tokens with another."""
    kind = type(model).__name__
    first, second = samples
    third = torch.cat([first[:SHARED], second[:SHARED]])
    try:
        packed = _packed(model, [first, second])
        shared = _shared(model, [first[:SHARED], second], [first[SHARED:], third[SHARED:]])
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{kind} cannot be learned from packed rows: {_first_line(error)}", REMEDY) from error
    try:
        alone = [_alone(model, sample) for sample in (first, second, third)]
    except Exception as error:
        raise ModelError(f"transformers cannot run {kind}: {_first_line(error)}", REMEDY) from error
    if not all(torch.isfinite(one).all() for one in alone):
        raise _NotFinite(
            f"{kind}'s weights give numbers that are not finite{_not_finite(model)}",
            "the folder's weights are broken: copy them again, or take an earlier checkpoint",
        )
    behind = [alone[0][:SHARED], alone[1], alone[0][SHARED:], alone[2][SHARED:]]
    for ours, theirs in ((packed, alone[:2]), (shared, behind)):
        _hold_together(kind, ours, theirs)


def _hold_together(kind: str, ours: Tensor, theirs: Sequence[Tensor]) -> None:
    own, *others = _apart(ours, theirs)
    apart = max(own, *others)
    # What leaks leaks into later samples alone; the first has rounding in it, and a scale that is not known. 16-bit
    # rounding differs from token to token, and a sound model that is refused is the worse mistake.
    most, more = (1e-3, 1e-3) if ours.dtype == torch.float32 else (0.15, 0.05)
    if not (apart < most and max(others) < 4 * own + more):
        raise ModelError(
            f"{kind} gives other logits of packed samples than of each alone (by {apart:.0%}): it mixes tokens, or "
            "changes logits, in a way that is not known",
            REMEDY,
        )


@torch.no_grad()
def _has_known_head(model: Any, sample: Tensor) -> bool:
    """Whether logits are the output layer's product of the decoder's states, scaled and capped as is known."""
    with plain(model):
        hidden = decoder_of(model)(input_ids=sample[None], use_cache=False).last_hidden_state[0]
    try:
        return max(_apart(logits.of(model, hidden), [_alone(model, sample)])) < MOST_OF_HEAD
    except RuntimeError:  # of other sizes
        return False


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _not_finite(model: Any) -> str:
    """The first tensor with NaN or infinity in it."""
    bad = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    return f": {bad[0]} holds NaN or infinity, as do {len(bad) - 1} others" if bad else ""


def _samples(model: Any) -> list[Tensor]:
    words = model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(1, sum(LENGTHS) + 1, device=next(model.parameters()).device) * STRIDE % words
    return list(tokens.split(LENGTHS))


def _packed(model: Any, samples: Sequence[Tensor]) -> Tensor:
    """(tokens, words), the way the learner goes."""
    device = samples[0].device
    context = choose(model, _kind(model)).packed([len(sample) for sample in samples], device)
    return _logits(model, context, samples, [0] * len(samples))


def _shared(model: Any, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> Tensor:
    """The same of prompts and responses that all continue the first."""
    device, owners = prompts[0].device, [0] * len(responses)
    begun, behind = ([len(one) for one in some] for some in (prompts, responses))
    context = choose(model, _kind(model)).shared(begun, behind, owners, device)
    starts = [0] * len(prompts) + [len(prompts[0])] * len(responses)
    return _logits(model, context, [*prompts, *responses], starts)


def _kind(model: Any) -> str:
    return "dense" if is_dense(model) else "blocks"


@torch.no_grad()
def _logits(model: Any, context: Context, parts: Sequence[Tensor], starts: Sequence[int]) -> Tensor:
    positions = torch.cat([torch.arange(at, at + len(one), device=one.device) for at, one in zip(starts, parts)])
    hidden = hidden_states(model, context, input_ids=torch.cat(list(parts))[None], position_ids=positions[None])
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
def _alone(model: Any, sample: Tensor) -> Tensor:
    with plain(model):
        found: Tensor = model(input_ids=sample[None], use_cache=False).logits[0]
    return found


def _apart(ours: Tensor, theirs: Sequence[Tensor]) -> list[float]:
    """Of each part, relative, its token in the middle: 16-bit rounding may send one token to another expert."""
    lengths = [len(one) for one in theirs]
    own, other = (x.float() - x.float().mean(-1, keepdim=True) for x in (ours, torch.cat(list(theirs))))
    gap = torch.linalg.vector_norm(own - other, dim=-1) / torch.linalg.vector_norm(other, dim=-1).clamp(min=1e-6)
    return [float(part.median()) for part in gap.split(lengths)]
