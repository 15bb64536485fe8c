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

from tidemill.models.attention.registry import AttentionForm
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


def make_block(starts: Sequence[int], lengths: Sequence[int], device: torch.device, at_least: int = 0) -> Block:
    longest = max(at_least, *lengths)
    tokens = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths)])
    place = np.concatenate([np.arange(i * longest, i * longest + n) for i, n in enumerate(lengths)])
    return Block(upload(tokens, device), upload(place, device), len(lengths), longest)


def alike(lengths: Sequence[int]) -> list[list[int]]:
    """Which sequences go together, the longest first."""
    found: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not found or lengths[i] < (1 - BLOCK_WASTE) * lengths[found[-1][0]]:
            found.append([])
        found[-1].append(i)
    return found


def blocks(lengths: Sequence[int], device: torch.device) -> list[Block]:
    """Packed sequences, sorted into dense blocks of like length."""
    starts = np.cumsum([0, *lengths])
    return [make_block(starts[some].tolist(), [lengths[i] for i in some], device) for some in alike(lengths)]


class Packed:
    """Every sample sees itself alone, causally."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.blocks = blocks(lengths, device)
        # Blocks come out in their own order; this brings tokens back to the packed order.
        order = torch.cat([b.tokens for b in self.blocks])
        is_sorted = len(self.blocks) == 1 and list(lengths) == sorted(lengths, reverse=True)
        self.restore = None if is_sorted else torch.argsort(order)

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
        parts = []
        for block in self.blocks:
            dense_q, dense_k, dense_v = (block.dense(x).transpose(1, 2) for x in (q, k, v))
            # Padding lies behind each sequence, where causal attention never looks.
            out = causal_attention(dense_q, dense_k, dense_v, form)
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
        self._masks: dict[tuple[int | None, int | None], Tensor] = {}

    def _mask(self, form: AttentionForm) -> Tensor:
        """(responses, 1, response tokens, prompt tokens + response tokens): who may be seen."""
        key = (form.window, form.chunk)
        if key not in self._masks:
            device = self.group.device
            prompt_at = torch.arange(self.prompts.longest, device=device)
            own_at = torch.arange(self.responses.longest, device=device)
            lengths = self.prompt_lengths[:, None, None]
            at = lengths + own_at[None, :, None]  # position of each query
            in_prompt = (prompt_at[None, None, :] < lengths) & seen(at, prompt_at, form)
            in_own = seen(at, lengths + own_at, form)
            self._masks[key] = torch.cat([in_prompt, in_own], -1).unsqueeze(1)
        return self._masks[key]

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
        prompt = [self.prompts.dense(x) for x in (q, k, v)]
        dense_q, dense_k, dense_v = (x.transpose(1, 2) for x in prompt)
        prompt_out = causal_attention(dense_q, dense_k, dense_v, form)
        if self.responses.longest == 0:
            return self.prompts.packed(prompt_out.transpose(1, 2))
        own = [self.responses.dense(x) for x in (q, k, v)]
        keys, values = (torch.cat([prompt[i].index_select(0, self.group), own[i]], 1).transpose(1, 2) for i in (1, 2))
        own_out = attention(own[0].transpose(1, 2), keys, values, self._mask(form), form)
        return torch.cat(
            [self.prompts.packed(prompt_out.transpose(1, 2)), self.responses.packed(own_out.transpose(1, 2))]
        )


def seen(query: Tensor, key: Tensor, form: AttentionForm) -> Tensor:
    """Whether a token at position `query` sees the one at position `key` of its own sequence."""
    allowed = key <= query
    return allowed if form.window is None and form.chunk is None else allowed & (key >= first_seen(query, form))


def first_seen(query: Tensor, form: AttentionForm) -> Tensor:
    """The first position that a token at position `query` sees; below 0 where a window reaches beyond the start."""
    if form.chunk is not None:
        return query // form.chunk * form.chunk
    return query - (form.window or 0) + 1 if form.window is not None else torch.zeros_like(query)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
    """(count, heads, length, dim), each position sees itself and those before it."""
    length = q.shape[2]
    is_whole = length <= min(n for n in (form.window, form.chunk, length) if n is not None)
    if is_whole and form.softcap is None and form.sinks is None:
        return _fused_attention(q, k, v, scale=form.scale, is_causal=True)
    at = torch.arange(length, device=q.device)
    return attention(q, k, v, seen(at[:, None], at[None, :], form), form)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, form: AttentionForm) -> Tensor:
    """`mask` says who is seen; of `form`, window and chunk are in it already."""
    if form.softcap is None and form.sinks is None:
        return _fused_attention(q, k, v, attn_mask=mask, scale=form.scale)
    k, v = _repeat(q, k, v)
    scores = q @ k.transpose(-1, -2) * form.scale
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    return softmax(scores.masked_fill(~mask, float("-inf")), form.sinks) @ v


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """scores (count, heads, queries, keys), in float32 and back; what goes to a sink is missing from the sums of 1."""
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    both = torch.cat([scores, beside.to(scores.dtype)], -1)
    return both.softmax(-1, torch.float32)[..., :-1].to(scores.dtype)


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
