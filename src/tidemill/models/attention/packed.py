"""Attention over packed sequences, for learning: samples one after another in one row, no padding between them.

`Packed` keeps every sample whole. `SharedPrompt` computes a group's prompt once: its responses attend to the prompt's
keys and values and to their own. Both gather into a dense block for the attention product alone, so the rest of the
network never sees a padded token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.models.upload import upload

# Sequences whose lengths differ by more than this share of the longest go to another block.
BLOCK_WASTE = 0.25


@dataclass(frozen=True, slots=True)
class Block:
    """Some sequences as one dense block: token i of the packed row lies at `place[i]` of (count × longest)."""

    tokens: Tensor  # indices into the packed row
    place: Tensor  # where each of them lies in the block
    count: int
    longest: int

    def dense(self, x: Tensor) -> Tensor:
        """(tokens, heads, dim) → (count, longest, heads, dim), zero where nothing lies."""
        flat = x.new_zeros((self.count * self.longest, *x.shape[1:]))
        return flat.index_copy(0, self.place, x.index_select(0, self.tokens)).view(
            self.count, self.longest, *x.shape[1:]
        )

    def packed(self, x: Tensor) -> Tensor:
        """(count, longest, heads, dim) → (tokens of this block, heads, dim)."""
        return x.reshape(self.count * self.longest, *x.shape[2:]).index_select(0, self.place)


def make_block(starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> Block:
    longest = max(lengths)
    tokens = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths)])
    place = np.concatenate([np.arange(i * longest, i * longest + n) for i, n in enumerate(lengths)])
    return Block(upload(tokens, device), upload(place, device), len(lengths), longest)


def blocks(lengths: Sequence[int], device: torch.device) -> list[Block]:
    """Packed sequences, sorted into dense blocks of like length."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    made: list[Block] = []
    current: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if current and lengths[i] < (1 - BLOCK_WASTE) * lengths[current[0]]:
            made.append(make_block([int(starts[j]) for j in current], [lengths[j] for j in current], device))
            current = []
        current.append(i)
    made.append(make_block([int(starts[j]) for j in current], [lengths[j] for j in current], device))
    return made


class Packed:
    """Every sample sees itself alone, causally."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.blocks = blocks(lengths, device)
        # Blocks come out in their own order; this brings tokens back to the packed order.
        order = torch.cat([b.tokens for b in self.blocks])
        is_sorted = len(self.blocks) == 1 and list(lengths) == sorted(lengths, reverse=True)
        self.restore = None if is_sorted else torch.argsort(order)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        parts = []
        for block in self.blocks:
            dense = (block.dense(x).transpose(1, 2) for x in (q, k, v))
            # Padding lies behind each sequence, where causal attention never looks.
            out = causal_attention(*dense, scale=scale, window=window, softcap=softcap)
            parts.append(block.packed(out.transpose(1, 2)))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if self.restore is None else out.index_select(0, self.restore)


class SharedPrompt:
    """The packed row is all prompts, then all responses; `group[i]` is the prompt that response i continues."""

    def __init__(
        self, prompts: Sequence[int], responses: Sequence[int], group: Sequence[int], device: torch.device
    ) -> None:
        self.split = sum(prompts)
        self.prompts = make_block([0, *np.cumsum(prompts)[:-1].tolist()], prompts, device)
        starts = self.split + np.concatenate([[0], np.cumsum(responses)[:-1]])
        self.responses = make_block(starts.tolist(), responses, device)
        self.group = upload(group, device)
        self.prompt_lengths = upload(np.asarray(prompts)[np.asarray(group)], device)
        self._masks: dict[int | None, Tensor] = {}

    def _mask(self, window: int | None) -> Tensor:
        """(responses, 1, response tokens, prompt tokens + response tokens): who may be seen."""
        if window not in self._masks:
            device = self.group.device
            prompt_at = torch.arange(self.prompts.longest, device=device)
            own_at = torch.arange(self.responses.longest, device=device)
            lengths = self.prompt_lengths[:, None, None]
            in_prompt = (prompt_at[None, None, :] < lengths).expand(-1, len(own_at), -1)
            in_own = (own_at[None, :] <= own_at[:, None]).expand(len(lengths), -1, -1)
            if window is not None:
                at = lengths + own_at[None, :, None]  # position of each query
                in_prompt = in_prompt & (at - prompt_at[None, None, :] < window)
                in_own = in_own & (own_at[:, None] - own_at[None, :] < window)
            self._masks[window] = torch.cat([in_prompt, in_own], -1).unsqueeze(1)
        return self._masks[window]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        prompt = [self.prompts.dense(x) for x in (q, k, v)]
        prompt_out = causal_attention(*(x.transpose(1, 2) for x in prompt), scale=scale, window=window, softcap=softcap)
        if self.responses.longest == 0:
            return self.prompts.packed(prompt_out.transpose(1, 2))
        own = [self.responses.dense(x) for x in (q, k, v)]
        keys, values = (torch.cat([prompt[i].index_select(0, self.group), own[i]], 1).transpose(1, 2) for i in (1, 2))
        own_out = attention(own[0].transpose(1, 2), keys, values, scale=scale, mask=self._mask(window), softcap=softcap)
        return torch.cat(
            [self.prompts.packed(prompt_out.transpose(1, 2)), self.responses.packed(own_out.transpose(1, 2))]
        )


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
) -> Tensor:
    """(count, heads, length, dim), each position sees itself and those before it."""
    if window is None or window >= q.shape[2]:
        if softcap is None:
            return _fused_attention(q, k, v, scale=scale, is_causal=True)
        window = None
    at = torch.arange(q.shape[2], device=q.device)
    mask = at[None, :] <= at[:, None]
    if window is not None:
        mask = mask & (at[:, None] - at[None, :] < window)
    return attention(q, k, v, scale=scale, mask=mask, softcap=softcap)


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor, softcap: float | None = None) -> Tensor:
    if softcap is None:
        return _fused_attention(q, k, v, attn_mask=mask, scale=scale)
    k, v = _repeat(q, k, v)
    scores = softcap * torch.tanh((q @ k.transpose(-1, -2)) * scale / softcap)
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


def _fused_attention(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """torch's own kernels. On a CPU they know fewer key heads than query heads; elsewhere not all of them do."""
    if q.device.type == "cpu":
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **how)
    return F.scaled_dot_product_attention(q, *_repeat(q, k, v), **how)


def _repeat(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Key/value heads once per query head."""
    times = q.shape[1] // k.shape[1]
    if times == 1:
        return k, v
    return k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
