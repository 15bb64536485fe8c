"""Attention over pages, for every device: walk the pages where they lie instead of gathering them per sequence.

Each page is one small matrix product with the queries of the sequences that own it; a sequence's pages are then joined
by the usual running-softmax identity. No cache byte is copied, cost follows the pages in use (not the longest
sequence), and a prompt page shared by a group is read once for all of its samples.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.batch import Array
from tidemill.models.attention.packed import first_seen, seen, softmax
from tidemill.models.attention.registry import AttentionForm
from tidemill.models.recurrent.mixers import Call
from tidemill.models.vision.eyes.eyes import Ahead
from tidemill.rollout.native.kernels.compiled import Kernels
from tidemill.rollout.native.pages import paged
from tidemill.rollout.native.pages.cache import PageStore
from tidemill.rollout.native.pages.paged import PagedAttention, Queries
from tidemill.rollout.native.pages.states import PassStates

warnings.filterwarnings("ignore", message=r"index_reduce\(\) is in beta")


@dataclass(frozen=True, slots=True)
class Walk:
    """Entries of (page, owners): `pages` is a run from the pool's start (an int, read in place) or page numbers."""

    pages: int | Tensor
    owners: Tensor  # (entries, owners) rows of the batch
    start: Tensor  # (entries, owners) position of the page's first token; past any length where there is no owner


@dataclass(frozen=True, slots=True)
class PageChunk:
    """Some consecutive tokens of one prompt: rows `first:last` of the batch, after `context` tokens already cached."""

    first: int
    last: int
    context: int
    pages: Tensor
    until: Tensor | None = None  # (tokens,) one more than the last place each sees, where that is not its own


class DecodeRows(Protocol):
    """The sequences that get one token in this pass, seen as pages to walk or as tables of pages."""

    count: int
    table: Array  # (slots, pages)
    slot: Array  # (count,)
    length: Array  # (count,) tokens each row sees, its own included

    @property
    def lengths(self) -> Tensor:
        """`length` on the device."""

    @property
    def walks(self) -> list[Walk]: ...

    @property
    def whole_tables(self) -> tuple[Tensor, Tensor]:
        """Pages (rows, pages) and lengths (rows,) on the device as int32."""


@dataclass(slots=True)
class Paged:
    """The attention context of one forward pass: decode `rows` of one token each, then chunks of prompts."""

    store: PageStore
    page: Tensor  # (tokens,) where each token's key and value go
    offset: Tensor
    rows: DecodeRows
    chunks: list[PageChunk]
    kernels: Kernels | None = None  # used for decoding where there are some
    has_drafts: bool = False  # some rows are of the same sequence, one token after another
    library: PagedAttention | None = None  # decodes instead of walking the pages; the store is then a `TokenStore`
    ahead: Ahead = "never"  # in which layers `until` of chunks counts
    states: PassStates | None = None  # of a model that has layers with some
    calls: int = 0  # of `attend` so far
    _bias: dict[tuple[int, int | None, int | None], Tensor] = field(default_factory=dict)

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
        decode, layer = self.rows.count, self.calls if layer is None else layer
        self.calls = layer + 1
        if self.kernels is not None and decode:
            out = self._decode_in_c(layer, q, k, v, form)
        else:
            self.store.write(layer, k, v, self.page, self.offset)
            if not self.chunks:
                return self._decode(layer, q, form)
            out = q.new_empty(*q.shape[:2], v.shape[-1])
            if decode:
                out[:decode] = self._decode(layer, q[:decode], form)
        for rows, chunks in _by_shape(self.chunks):
            out[rows] = self._prefill(layer, q, k, v, rows, chunks, form)
        return out

    def recur(self, call: Call) -> Any:
        assert self.states is not None
        return self.states.recur(call)

    def _decode_in_c(self, layer: int, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
        assert self.kernels is not None
        keys, values = self.store.layer(layer, k, v)
        rows, decode = self.rows, self.rows.count
        out = torch.empty(*q.shape[:2], v.shape[-1])
        new_q, new_k, new_v = q[:decode].contiguous(), k[:decode].contiguous(), v[:decode].contiguous()
        if self.has_drafts:  # rows of one sequence may be served by different threads, and must see each other
            self.store.write(layer, new_k, new_v, self.page[:decode], self.offset[:decode])
        scales = self.store.scales.get(layer)
        self.kernels.attend(new_q, new_k, new_v, keys, values, rows.table, rows.slot, rows.length, out, form, scales)
        if self.chunks:
            self.store.write(layer, k[decode:], v[decode:], self.page[decode:], self.offset[decode:])
        return out

    def _decode(self, layer: int, q: Tensor, form: AttentionForm) -> Tensor:
        if paged.takes(self.library, form) or not paged.can_walk(q.device):
            queries = Queries(*self.rows.whole_tables, self.rows.length.tolist(), form.scale, form.window)
            return paged.attend(self.store, layer, q, queries, form, self.library)
        store = self.store
        kv_heads, dim = store.heads(layer)
        rows, heads = q.shape[:2]
        walks = self.rows.walks
        q = (q * form.scale).reshape(rows, -1)
        sinks = None if form.sinks is None else form.sinks.to(q.dtype).expand(rows, heads)
        peak = q.new_full((rows, heads), torch.finfo(q.dtype).min) if sinks is None else sinks.clone()
        scored = []
        for i, walk in enumerate(walks):
            scores = _scores(q, store.read_keys(layer, walk.pages, q.dtype), walk, heads // kv_heads)
            if form.softcap is not None:
                scores.div_(form.softcap).tanh_().mul_(form.softcap)
            scores.add_(self._mask(i, form))
            most = scores.amax(-1).transpose(1, 2).reshape(-1, heads)
            peak.index_reduce_(0, walk.owners.view(-1), most, "amax")
            scored.append(scores)
        total = q.new_zeros(rows, heads) if sinks is None else (sinks - peak).exp_()
        out = q.new_zeros(rows, heads * dim)
        for walk, scores in zip(walks, scored):
            entries, owners = walk.owners.shape
            flat = walk.owners.view(-1)
            shift = peak.index_select(0, flat).view(entries, owners, kv_heads, -1, 1).transpose(1, 2)
            weight = scores.sub_(shift).exp_()  # (entries, kv_heads, owners, group, page_size)
            total.index_add_(0, flat, weight.sum(-1).transpose(1, 2).reshape(-1, heads))
            part = (
                _weighted(weight, store.read_values(layer, walk.pages, q.dtype))
                .transpose(1, 2)
                .reshape(-1, heads * dim)
            )
            out.index_add_(0, flat, part)
        return out.view(rows, heads, dim).div_(total.unsqueeze(-1))

    def _mask(self, walk: int, form: AttentionForm) -> Tensor:
        """0 where an owner sees a position of the page, -inf elsewhere: (entries, 1, owners, 1, page_size)."""
        key = (walk, form.window, form.chunk)
        if key not in self._bias:
            self._bias[key] = _page_bias(self.rows.walks[walk], self.rows.lengths, self.store.page_size, form)
        return self._bias[key]

    def _prefill(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Tensor | slice,
        chunks: list[PageChunk],
        form: AttentionForm,
    ) -> Tensor:
        """Chunks of one shape at once: (chunks, heads, tokens, dim) against their own context."""
        n, length, context = len(chunks), chunks[0].last - chunks[0].first, chunks[0].context
        q = q[rows].view(n, length, *q.shape[1:]).transpose(1, 2)
        if context == 0:
            k = k[rows].view(n, length, *k.shape[1:]).transpose(1, 2)
            v = v[rows].view(n, length, *v.shape[1:]).transpose(1, 2)
        else:
            pages = torch.cat([chunk.pages for chunk in chunks])
            k = unpage(self.store.read_keys(layer, pages, q.dtype).transpose(2, 3), n, context + length)
            v = unpage(self.store.read_values(layer, pages, q.dtype), n, context + length)
        out = causal_attention(q, k, v, context, form, self._until(chunks, form.window))
        return out.transpose(1, 2).reshape(n * length, q.shape[1], -1)

    def _until(self, chunks: list[PageChunk], window: int | None) -> Tensor | None:
        """(chunks, tokens), where some of them see ahead in this layer."""
        counts = self.ahead == "always" or (self.ahead == "windows" and window is not None)
        if not counts or all(chunk.until is None for chunk in chunks):
            return None
        plain = torch.arange(chunks[0].last - chunks[0].first, device=self.page.device) + chunks[0].context + 1
        return torch.stack([plain if chunk.until is None else chunk.until for chunk in chunks])


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, context: int, form: AttentionForm, until: Tensor | None = None
) -> Tensor:
    """q (n, heads, tokens, dim) at positions `context …` over k, v (n, kv_heads, context + tokens, dim). `until`
    (n, tokens): one more than the last that each sees, where it is not itself."""
    tokens, total = q.shape[2], k.shape[2]
    at, keys = torch.arange(context, total, device=q.device).unsqueeze(1), torch.arange(total, device=q.device)
    allowed = seen(at, keys, form)
    if until is not None:
        allowed = (keys < until[:, None, :, None]) & (keys >= first_seen(at, form))
    if form.softcap is None and form.sinks is None:
        nearest = min(n for n in (form.window, form.chunk, tokens) if n is not None)
        causal = until is None and context == 0 and nearest >= tokens
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=None if causal else allowed, is_causal=causal, scale=form.scale, enable_gqa=True
        )
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * form.scale
    if form.softcap is not None:
        scores = (scores / form.softcap).tanh() * form.softcap
    return softmax(scores.masked_fill(~allowed, float("-inf")), form.sinks) @ v.repeat_interleave(group, 1)


def _scores(q: Tensor, keys: Tensor, walk: Walk, group: int) -> Tensor:
    """(entries, kv_heads, owners, group, page_size)"""
    _, kv_heads, dim, page_size = keys.shape
    entries, owners = walk.owners.shape
    q = q.index_select(0, walk.owners.view(-1)).view(entries, owners, kv_heads, group * dim)
    if owners > 1:
        q = q.transpose(1, 2)
    q = q.reshape(entries * kv_heads, owners * group, dim)
    out = torch.bmm(q, keys.reshape(entries * kv_heads, dim, page_size))
    return out.view(entries, kv_heads, owners, group, page_size)


def _weighted(weight: Tensor, values: Tensor) -> Tensor:
    """(entries, kv_heads, owners, group * v_dim)"""
    entries, kv_heads, owners, group, page_size = weight.shape
    v = values.reshape(entries * kv_heads, page_size, -1)
    out = torch.bmm(weight.view(entries * kv_heads, owners * group, page_size), v)
    return out.view(entries, kv_heads, owners, -1)


def _page_bias(walk: Walk, lengths: Tensor, page_size: int, form: AttentionForm) -> Tensor:
    entries, owners = walk.owners.shape
    length = lengths.index_select(0, walk.owners.view(-1))
    start = walk.start.view(-1)
    # Row `s` of the table lets the first `s` positions of a page be seen.
    table = torch.full((page_size + 1, page_size), float("-inf"), device=lengths.device).triu_()
    bias = table.index_select(0, (length - start).clamp_(0, page_size))
    if form.window is not None or form.chunk is not None:
        hidden = (first_seen(length - 1, form) - start).clamp_(0, page_size)
        before = torch.arange(page_size, device=lengths.device) < hidden.unsqueeze(1)
        bias.masked_fill_(before, float("-inf"))
    return bias.view(entries, 1, owners, 1, page_size)


def _by_shape(chunks: list[PageChunk]) -> list[tuple[Tensor | slice, list[PageChunk]]]:
    """Chunks of equal length and context together, with their rows of the batch."""
    shapes: dict[tuple[int, int], list[PageChunk]] = {}
    for chunk in chunks:
        shapes.setdefault((chunk.last - chunk.first, chunk.context), []).append(chunk)
    return [(_rows(group), group) for group in shapes.values()]


def _rows(chunks: list[PageChunk]) -> Tensor | slice:
    joined = all(a.last == b.first for a, b in pairwise(chunks))
    if joined:
        return slice(chunks[0].first, chunks[-1].last)
    return torch.cat([torch.arange(chunk.first, chunk.last) for chunk in chunks])


def unpage(pages: Tensor, n: int, tokens: int) -> Tensor:
    """Pages (n * each, kv_heads, page_size, dim) of n sequences → (n, kv_heads, tokens, dim)."""
    _, kv_heads, page_size, dim = pages.shape
    apart = pages.reshape(n, -1, kv_heads, page_size, dim).transpose(1, 2)
    return apart.reshape(n, kv_heads, -1, dim)[:, :, :tokens]
