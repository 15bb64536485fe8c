"""Attention of one new token per sequence over copies of its pages, some pages at a time: nothing but products, maxima
and sums, so it runs on any device and in a captured graph. What walks pages in place, or a library's kernel, is faster
where there is one; this serves every form of attention, and is the plain twin of both."""

from __future__ import annotations

import torch
from torch import Tensor

from tidemill.models.attention.packed import first_seen
from tidemill.models.attention.registry import AttentionForm
from tidemill.rollout.native.pages.cache import PageStore

GATHERED_BYTES = 64 << 20  # of keys, and as many of values, copied at once
NOTHING = -1e30  # a score that weighs nothing, and is no infinity: a block may hold nothing that is seen


def attend(q: Tensor, store: PageStore, layer: int, table: Tensor, length: Tensor, form: AttentionForm) -> Tensor:
    """q (rows, heads, dim); `table` (rows, pages); `length` (rows,): tokens that each row sees, its own included."""
    rows, heads, dim = q.shape
    (kv_heads, v_dim), size = store.heads(layer), store.page_size
    wide = (q * form.scale).view(rows, kv_heads, heads // kv_heads, dim)
    length = length.view(rows, 1)
    since = None if form.window is None and form.chunk is None else first_seen(length - 1, form)
    peak, total = _nothing_yet(wide, form)
    out = wide.new_zeros(*wide.shape[:3], v_dim)
    at_once = max(1, GATHERED_BYTES // (rows * kv_heads * dim * size * q.element_size()))
    for start in range(0, table.shape[1], at_once):
        pages = table[:, start : start + at_once]
        flat, many = pages.reshape(-1), pages.shape[1] * size
        k = store.read_keys(layer, flat, q.dtype).reshape(rows, -1, kv_heads, dim, size)
        v = store.read_values(layer, flat, q.dtype).reshape(rows, -1, kv_heads, size, v_dim)
        k, v = k.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, dim, many), v.transpose(1, 2)
        scores = wide @ k  # (rows, kv_heads, group, many)
        if form.softcap is not None:
            scores = (scores / form.softcap).tanh() * form.softcap
        place = torch.arange(start * size, start * size + many, device=q.device)
        seen = place < length if since is None else (place < length) & (place >= since)
        seen = seen.view(rows, 1, 1, many)
        higher = torch.maximum(peak, scores.masked_fill(~seen, NOTHING).amax(-1, keepdim=True))
        weight = (scores - higher).exp().masked_fill(~seen, 0.0)
        fade = (peak - higher).exp()
        total = total * fade + weight.sum(-1, keepdim=True)
        out = out * fade + weight @ v.reshape(rows, kv_heads, many, v_dim)
        peak = higher
    return (out / total).view(rows, heads, v_dim)


def _nothing_yet(wide: Tensor, form: AttentionForm) -> tuple[Tensor, Tensor]:
    """The running softmax before any page: its peak and its sum, (rows, kv_heads, group, 1)."""
    peak = wide.new_full((*wide.shape[:3], 1), NOTHING)
    if form.sinks is None:
        return peak, torch.zeros_like(peak)
    sinks = form.sinks.to(wide.dtype).view(1, *wide.shape[1:3], 1)
    return sinks.expand_as(peak), torch.ones_like(peak)
