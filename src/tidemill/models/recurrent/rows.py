"""Recurrent layers over packed samples: states begin at each sample's first token, and go from a shared prompt's end
into every response that continues it.

Samples of like length are one dense batch each, padded behind their ends, where causal layers never look. Prompts whose
last state is wanted are batched with those of their own length alone, so that it is the state after their last token.
Layers that cannot go on from a state read the prompt once more before every response. Layers that are computed in
chunks (`chunked`) take the packed row as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.models.attention.packed import Block, alike, blocks, make_block
from tidemill.models.attention.registry import AttentionForm, Context
from tidemill.models.attention.wholes import Wholes
from tidemill.models.recurrent.chunked import layer, on_device
from tidemill.models.recurrent.chunked.plan import RowPlan
from tidemill.models.recurrent.mixers import Call, Join, Made, joined
from tidemill.models.recurrent.states import State
from tidemill.models.upload import upload

# Tokens behind a state. Single ones take transformers' decoding path, which changes states in place: no gradient knows.
LEAST = 2


class PackedStates:
    """Every sample by itself."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths, self.device = [n for n in lengths if n], device

    def recur(self, call: Call) -> Any:
        if on_device.is_chunked(call.module, self.device):
            return _chunked(call, self._row)
        made = [_on(call, block)[0] for block in self._blocks]
        return joined(made, _in_order(self._restore))

    @cached_property
    def _row(self) -> RowPlan:
        return RowPlan.packed(self.lengths, self.device)

    @cached_property
    def _blocks(self) -> list[Block]:
        return blocks(self.lengths, self.device)

    @cached_property
    def _restore(self) -> Tensor:
        return _restore(self._blocks)


class SharedStates:
    """All prompts, then all responses; `group[i]` is the prompt that response i continues."""

    def __init__(
        self, prompts: Sequence[int], responses: Sequence[int], group: Sequence[int], device: torch.device
    ) -> None:
        self.prompts, self.responses, self.group, self.device = prompts, responses, group, device

    def recur(self, call: Call) -> Any:
        if on_device.is_chunked(call.module, self.device):
            return _chunked(call, self._row)
        if not call.goes_on:
            return self._again(call)
        plan = self._plan
        made, ends = map(list, zip(*[_on(call, block) for block in plan.prompts]))
        if plan.responses:
            after = {key: torch.cat([end[key] for end in ends]).index_select(0, plan.order) for key in ends[0]}
        for block, owner in plan.responses:
            begins = {key: state.index_select(0, owner) for key, state in after.items()}
            made.append(_on(call, block, begins)[0])
        return joined(made, _in_order(plan.restore))

    def _again(self, call: Call) -> Any:
        """From the start of every prompt, for itself and before each response."""
        made = []
        for whole in self._wholes.parts:
            out, _ = call.on(whole.block.dense, None)
            made.append(Made(out, (whole.block.count, whole.block.longest), whole.own.packed))
        return joined(made, _in_order(self._wholes.restore))

    @cached_property
    def _row(self) -> RowPlan:
        return RowPlan.shared(self.prompts, self.responses, self.group, self.device)

    @cached_property
    def _wholes(self) -> Wholes:
        return Wholes.shared(self.prompts, self.responses, self.group, self.device)

    @cached_property
    def _plan(self) -> _Plan:
        starts = np.cumsum([0, *self.prompts])
        by_length = {n: [i for i, m in enumerate(self.prompts) if m == n] for n in self.prompts}
        prompts = [make_block(starts[own].tolist(), [n] * len(own), self.device) for n, own in by_length.items()]
        order = np.argsort([i for own in by_length.values() for i in own])
        kept = [i for i, n in enumerate(self.responses) if n]
        begins = starts[-1] + np.cumsum([0, *self.responses])
        responses = []
        for some in alike([self.responses[i] for i in kept]):
            rows = [kept[i] for i in some]
            lengths = [self.responses[i] for i in rows]
            block = make_block(begins[rows].tolist(), lengths, self.device, LEAST)
            responses.append((block, upload([self.group[i] for i in rows], self.device)))
        restore = _restore([*prompts, *(block for block, _ in responses)])
        return _Plan(prompts, upload(order, self.device), responses, restore)


@dataclass(frozen=True, slots=True)
class _Plan:
    prompts: list[Block]
    order: Tensor  # where each prompt comes among those of the blocks
    responses: list[tuple[Block, Tensor]]  # with the prompt of each
    restore: Tensor  # from the order of all blocks to the row's


class Along:
    """An attention context whose row's states are known."""

    def __init__(self, inner: Context, states: PackedStates | SharedStates) -> None:
        self.inner, self.states = inner, states
        self.is_traced = getattr(inner, "is_traced", False)

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
        return self.inner.attend(layer, q, k, v, form)

    def recur(self, call: Call) -> Any:
        return self.states.recur(call)


def _chunked(call: Call, row: RowPlan) -> Tensor:
    return layer.forward(call.module, call.hidden, row)[0][None]


def _on(call: Call, block: Block, begins: State | None = None) -> tuple[Made, State]:
    out, ends = call.on(block.dense, begins)
    return Made(out, (block.count, block.longest), block.packed), ends


def _restore(found: Sequence[Block]) -> Tensor:
    return torch.argsort(torch.cat([block.tokens for block in found]))


def _in_order(restore: Tensor) -> Join:
    return lambda parts: torch.cat(parts).index_select(0, restore)[None]
