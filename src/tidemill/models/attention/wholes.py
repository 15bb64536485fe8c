"""Packed rows as batches of whole sequences, for modules that must read each from its first token.

A response that shares its prompt is a sequence whose first tokens are the prompt's: they are computed once more for it,
and what comes of them is taken from the prompt itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidemill.models.attention.packed import Block, alike
from tidemill.models.attention.registry import AttentionForm
from tidemill.models.upload import upload

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Whole:
    """Sequences of like length as one dense batch, padded behind their ends."""

    block: Block
    own: Block  # those of its tokens that are taken from it


@dataclass(frozen=True, slots=True)
class Wholes:
    parts: list[Whole]
    restore: Tensor  # from the order of all parts to the row's

    @staticmethod
    def packed(lengths: Sequence[int], device: torch.device) -> Wholes:
        return Wholes.of([(np.empty(0, np.int64), own) for own in _ranges(0, lengths)], device)

    @staticmethod
    def shared(prompts: Sequence[int], responses: Sequence[int], group: Sequence[int], device: torch.device) -> Wholes:
        read = _ranges(0, prompts)
        alone = [(np.empty(0, np.int64), own) for own in read]
        behind = [(read[g], own) for g, own in zip(group, _ranges(sum(prompts), responses))]
        return Wholes.of([*alone, *behind], device)

    @staticmethod
    def of(sequences: Sequence[tuple[Ints, Ints]], device: torch.device) -> Wholes:
        """Of each the tokens that come before, and its own."""
        kept = [(before, own) for before, own in sequences if len(own)]
        parts = []
        for some in alike([len(before) + len(own) for before, own in kept]):
            longest = len(kept[some[0]][0]) + len(kept[some[0]][1])
            all_tokens, all_places, own_tokens, own_places = [], [], [], []
            for row, i in enumerate(some):
                before, own = kept[i]
                start, first, end = row * longest, row * longest + len(before), row * longest + len(before) + len(own)
                all_tokens += [before, own]
                own_tokens.append(own)
                all_places.append(np.arange(start, end))
                own_places.append(np.arange(first, end))
            pairs = (all_tokens, all_places), (own_tokens, own_places)
            whole, own_block = (
                Block(upload(np.concatenate(a), device), upload(np.concatenate(b), device), len(some), longest)
                for a, b in pairs
            )
            parts.append(Whole(whole, own_block))
        return Wholes(parts, torch.argsort(torch.cat([part.own.tokens for part in parts])))


def _ranges(start: int, lengths: Sequence[int]) -> list[Ints]:
    return [np.arange(a, b) for a, b in pairwise(start + np.cumsum([0, *lengths]))]


class Dense:
    """The context of models that only transformers' own attention serves: whole samples through the decoder itself."""

    def __init__(self, wholes: Wholes) -> None:
        self.wholes = wholes

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
        raise RuntimeError("a model that is computed densely has called the attention of packed rows")

    def through(self, decoder: Callable[..., Any], ids: Tensor) -> Tensor:
        """ids (tokens,) → (1, tokens, width)"""
        made = []
        for whole in self.wholes.parts:
            out: Tensor = decoder(input_ids=whole.block.dense(ids), use_cache=False).last_hidden_state
            made.append(whole.own.packed(out))
        return torch.cat(made).index_select(0, self.wholes.restore)[None]


def packed(lengths: Sequence[int], device: torch.device) -> Dense:
    return Dense(Wholes.packed(lengths, device))


def shared(prompts: Sequence[int], responses: Sequence[int], group: Sequence[int], device: torch.device) -> Dense:
    return Dense(Wholes.shared(prompts, responses, group, device))
