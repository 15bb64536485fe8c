"""Which attention serves packed rows on which device: the one registry for learning.

| kind | what it is | where |
|---|---|---|
| blocks | dense blocks of like length and torch's own attention: the plain reference | everywhere |
| short | short sequences one by one, nothing padded; others as `blocks` | float32 on a CPU with a C compiler |
| flash | variable-length flash kernel | devices torch has it for; 16-bit weights, no softcap |
| fusion | Ascend's fused operator | where the vendor's package has it; 16-bit weights, no softcap |
| flex | compiled FlexAttention over a block mask | devices with a Triton compiler; any dtype, softcap |
| dense | whole samples, by the model's own attention | models that ours cannot serve |
| rowwise | the same bits whatever shares the batch (rollout.batch_invariant) | float32 on a CPU with a C compiler |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tidemill.errors import ConfigError, did_you_mean
from tidemill.models.attention import ascend as fusion
from tidemill.models.attention import flex, packed, short, varlen, wholes
from tidemill.models.attention.registry import Context, is_dense
from tidemill.models.layers import rowwise
from tidemill.models.recurrent import mixers
from tidemill.models.recurrent.rows import Along, PackedStates, SharedStates

MakePacked = Callable[[Sequence[int], torch.device], Context]
MakeShared = Callable[[Sequence[int], Sequence[int], Sequence[int], torch.device], Context]


@dataclass(frozen=True, slots=True)
class Attention:
    packed: MakePacked  # lengths of the samples
    shared: MakeShared  # lengths of prompts, of responses; each response's prompt


KINDS: dict[str, Attention] = {
    "blocks": Attention(packed.Packed, packed.SharedPrompt),
    "short": Attention(short.packed, short.shared),
    "flash": Attention(varlen.FlashPacked, varlen.FlashShared),
    "fusion": Attention(
        partial(varlen.FlashPacked, kernel=fusion.causal, is_traced=False),
        partial(varlen.FlashShared, kernel=fusion.causal, is_traced=False),
    ),
    "flex": Attention(flex.packed, flex.shared),
    "rowwise": Attention(rowwise.packed, rowwise.shared),
    "dense": Attention(wholes.packed, wholes.shared),
}


def choose(model: Any, asked: str = "auto") -> Attention:
    """`asked` by name, or what suits the model's device, dtype and shape; with states, if the model has layers whose
    state goes along the sequence."""
    if is_dense(model):
        if asked not in ("auto", "dense"):
            raise ConfigError(
                f"learn.attention={asked}, but {type(model).__name__} is computed by its own attention alone",
                "use auto",
            )
        return KINDS["dense"]
    chosen = _choose(model, asked)
    if not mixers.has_some(model):
        return chosen
    if asked == "rowwise":
        kind = type(model).__name__
        raise ConfigError(f"rollout.batch_invariant: {kind} has layers that it is not known for", "set it to false")
    return _along(chosen)


def _along(attention: Attention) -> Attention:
    def packed(lengths: Sequence[int], device: torch.device) -> Context:
        return Along(attention.packed(lengths, device), PackedStates(lengths, device))

    def shared(prompts: Sequence[int], responses: Sequence[int], owner: Sequence[int], device: torch.device) -> Context:
        states = SharedStates(prompts, responses, owner, device)
        return Along(attention.shared(prompts, responses, owner, device), states)

    return Attention(packed, shared)


def _choose(model: Any, asked: str) -> Attention:
    if asked != "auto":
        if asked not in KINDS:
            raise ConfigError(
                f"learn.attention={asked} is unknown{did_you_mean(asked, KINDS)}", f"use auto, {', '.join(KINDS)}"
            )
        return KINDS[asked]
    weight = next(model.parameters())
    settings = model.config.get_text_config()
    capped = getattr(settings, "attn_logit_softcapping", None) is not None
    if varlen.works_on(weight.device, weight.dtype) and not capped and _head_dim(settings) <= varlen.MOST_DIM:
        return KINDS["flash"]
    if fusion.works_on(weight.device, weight.dtype) and not capped:
        return KINDS["fusion"]
    return KINDS["short" if short.works_on(weight.device, weight.dtype) else "blocks"]


def _head_dim(settings: Any) -> int:
    return int(getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads)
