"""Packed attention as one compiled FlexAttention call, for devices and models that the flash kernel does not serve.

Who sees whom is two intervals per token: its own sequence up to itself, and, for a response that shares its prompt, the
prompt. Which 128 × 128 blocks hold anything is worked out on the host from the lengths; no mask is ever materialised.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidemill.device.compiling import follow_torch
from tidemill.models.attention.packed import seen as sees
from tidemill.models.attention.registry import AttentionForm
from tidemill.models.upload import upload

if TYPE_CHECKING:  # slow to import, and only wanted where it is used
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sight:
    """Token t sees [start[t], t] and [prompt_start[t], prompt_end[t])."""

    start: Ints
    prompt_start: Ints
    prompt_end: Ints
    position: Ints  # in its own sequence, prompt included

    @staticmethod
    def packed(lengths: Sequence[int]) -> Sight:
        starts = np.cumsum([0, *lengths])[:-1]
        start = np.repeat(starts, lengths)
        none = np.zeros_like(start)
        return Sight(start, none, none, np.arange(len(start)) - start)

    @staticmethod
    def shared(prompts: Sequence[int], responses: Sequence[int], group: Sequence[int]) -> Sight:
        own = Sight.packed([*prompts, *responses])
        at, split = np.cumsum([0, *prompts]), sum(prompts)
        of = np.repeat(np.asarray(group, np.int64), responses)
        first, last, position = own.prompt_start.copy(), own.prompt_end.copy(), own.position.copy()
        first[split:], last[split:] = at[:-1][of], at[1:][of]
        position[split:] += last[split:] - first[split:]
        return Sight(own.start, first, last, position)

    def dense(self, window: int | None = None, chunk: int | None = None) -> npt.NDArray[np.bool_]:
        """(tokens, tokens): the whole mask, for tests."""
        k, q = np.arange(len(self.start))[None, :], np.arange(len(self.start))[:, None]
        seen = (self.start[:, None] <= k) & (k <= q)
        seen |= (self.prompt_start[:, None] <= k) & (k < self.prompt_end[:, None])
        if window is not None:
            seen &= self.position[:, None] - self.position[None, :] < window
        if chunk is not None:
            seen &= self.position[:, None] // chunk == self.position[None, :] // chunk
        return np.asarray(seen)


def block_table(sight: Sight, is_local: bool) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """(query blocks, key blocks): where a token may be seen, and where surely every one is seen by every one.

    Blocks called partial though they are full or (where attention is local) empty cost a little time, never a wrong
    number.
    """
    tokens = len(sight.start)
    count = -(-tokens // BLOCK)
    at = np.arange(tokens)
    edges = np.zeros((count, count + 1), np.int64)
    np.add.at(edges, (at // BLOCK, sight.start // BLOCK), 1)
    np.add.at(edges, (at // BLOCK, at // BLOCK + 1), -1)
    with_prompt = np.flatnonzero(sight.prompt_end > sight.prompt_start)
    np.add.at(edges, (with_prompt // BLOCK, sight.prompt_start[with_prompt] // BLOCK), 1)
    np.add.at(edges, (with_prompt // BLOCK, (sight.prompt_end[with_prompt] - 1) // BLOCK + 1), -1)
    some = np.cumsum(edges, 1)[:, :-1] > 0
    if is_local:
        return some, np.zeros_like(some)
    heads = np.arange(0, tokens, BLOCK)
    block = np.arange(count) * BLOCK
    below = (block[None, :] + BLOCK <= block[:, None]) & (np.maximum.reduceat(sight.start, heads)[:, None] <= block)
    inside = (np.maximum.reduceat(sight.prompt_start, heads)[:, None] <= block) & (
        block + BLOCK <= np.minimum.reduceat(sight.prompt_end, heads)[:, None]
    )
    full = below | inside
    if tokens % BLOCK:  # the last blocks are cut off, and a block said to be full is not cut
        full[-1, :] = full[:, -1] = False
    return some, full & some


class Flex:
    """Attention of one packed row."""

    def __init__(self, sight: Sight, device: torch.device) -> None:
        self.sight, self.device = sight, device
        self.start, self.first, self.last, self.position = (
            upload(x, device, np.int32) for x in (sight.start, sight.prompt_start, sight.prompt_end, sight.position)
        )
        self._masks: dict[tuple[int | None, int | None], BlockMask] = {}

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
        key = (form.window, form.chunk)
        if key not in self._masks:
            self._masks[key] = self._block_mask(form)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        made = _compiled()(
            q, k, v, score_mod=_capped(form.softcap), block_mask=self._masks[key], scale=form.scale, enable_gqa=True,
            return_lse=form.sinks is not None,
        )  # fmt: skip
        if form.sinks is None:
            return cast(Tensor, made[0].transpose(0, 1))
        out, log_z = made
        kept = (log_z - form.sinks[None, :, None]).sigmoid()  # what does not go to the sink
        return cast(Tensor, (out * kept.unsqueeze(-1).to(out.dtype))[0].transpose(0, 1))

    def _block_mask(self, form: AttentionForm) -> BlockMask:
        from torch.nn.attention.flex_attention import BlockMask

        some, full = block_table(self.sight, form.window is not None or form.chunk is not None)
        tokens = len(self.sight.start)
        counts, blocks, full_counts, full_blocks = (
            upload(x, self.device, np.int32)[None, None] for m in (some & ~full, full) for x in _indices(m)
        )
        return BlockMask.from_kv_blocks(
            counts, blocks, full_counts, full_blocks,
            BLOCK_SIZE=BLOCK, mask_mod=self._seen(form), seq_lengths=(tokens, tokens),
        )  # fmt: skip

    def _seen(self, form: AttentionForm) -> Callable[..., Tensor]:
        start, first, last, position = self.start, self.first, self.last, self.position

        def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return ((start[q] <= k) & (k <= q)) | ((first[q] <= k) & (k < last[q]))

        def seen_near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return seen(b, h, q, k) & sees(position[q], position[k], form)

        return seen if form.window is None and form.chunk is None else seen_near


def _indices(mask: npt.NDArray[np.bool_]) -> tuple[Any, Any]:
    """How many key blocks each query block has, and which: those first in each row."""
    return mask.sum(1), np.argsort(~mask, axis=1, kind="stable")


def packed(lengths: Sequence[int], device: torch.device) -> Flex:
    return Flex(Sight.packed(lengths), device)


def shared(prompts: Sequence[int], responses: Sequence[int], group: Sequence[int], device: torch.device) -> Flex:
    return Flex(Sight.shared(prompts, responses, group), device)


@functools.cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    follow_torch()
    return torch.compile(flex_attention, dynamic=True)


@functools.cache
def _capped(softcap: float | None) -> Callable[..., Tensor] | None:
    if softcap is None:
        return None

    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped
