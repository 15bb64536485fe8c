"""Decode attention over a latent cache as Triton kernels: all heads of a token read the same latents.

A program serves some heads of one row over one part of its sequence. The latent is read once, as key and as value; the
rotary key lies in the last rows of the page's keys.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Arguments of a kernel are pointers and constants of Triton's own language, which has no types to name.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 16  # of one program: with more, sums of 512 columns would leave the registers
PROGRAMS_WANTED = 4 * 132
MOST_SPLITS = 16


@triton.jit
def _attend(
    q, keys, values, table, length, part, stats, scale, table_stride,
    HEADS_ALL: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(2)
    n = tl.load(length + row)
    share = tl.cdiv(tl.cdiv(n, SPLITS), BLOCK_N) * BLOCK_N
    start, stop = split * share, tl.minimum(split * share + share, n)
    c, r = tl.arange(0, RANK_PAD), tl.arange(0, ROPE_PAD)
    is_head, is_c, is_r = head < HEADS_ALL, c < RANK, r < ROPE
    base = q + (row * HEADS_ALL + head)[:, None] * (RANK + ROPE)
    ask = tl.load(base + c[None, :], mask=is_head[:, None] & is_c[None, :], other=0.0)
    turned = tl.load(base + RANK + r[None, :], mask=is_head[:, None] & is_r[None, :], other=0.0)
    peak = tl.full((BLOCK_H,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, RANK_PAD), tl.float32)
    for first in range(start, stop, BLOCK_N):
        at = first + tl.arange(0, BLOCK_N)
        page = tl.load(table + row * table_stride + first // PAGE).to(tl.int64)
        inner = first % PAGE + tl.arange(0, BLOCK_N)
        latent = tl.load(
            values + page * (PAGE * RANK) + inner[:, None] * RANK + c[None, :], mask=is_c[None, :], other=0.0
        )
        rotary = tl.load(
            keys + page * ((RANK + ROPE) * PAGE) + (RANK + r)[:, None] * PAGE + inner[None, :],
            mask=is_r[:, None], other=0.0,
        )  # fmt: skip
        score = tl.dot(ask, tl.trans(latent), input_precision="ieee")
        score = tl.dot(turned, rotary, score, input_precision="ieee") * scale
        score = tl.where((at < stop)[None, :], score, -1e30)
        higher = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        fade = tl.exp(peak - higher)
        total = total * fade + tl.sum(weight, 1)
        acc = acc * fade[:, None]
        acc = tl.dot(weight.to(latent.dtype), latent, acc, input_precision="ieee")
        peak = higher
    cell = (row * HEADS_ALL + head) * SPLITS + split
    tl.store(part + cell[:, None] * RANK + c[None, :], acc, mask=is_head[:, None] & is_c[None, :])
    tl.store(stats + cell * 2, peak, mask=is_head)
    tl.store(stats + cell * 2 + 1, total, mask=is_head)


@triton.jit
def _join(part, stats, out, RANK: tl.constexpr, RANK_PAD: tl.constexpr, SPLITS: tl.constexpr):
    """The parts of one head, weighed by their sums; a part without a position weighs nothing."""
    head = tl.program_id(0).to(tl.int64)
    s, c = tl.arange(0, SPLITS), tl.arange(0, RANK_PAD)
    cell = head * SPLITS + s
    peak = tl.load(stats + cell * 2)
    scale = tl.exp(peak - tl.max(peak, 0))
    total = tl.sum(tl.load(stats + cell * 2 + 1) * scale, 0)
    value = tl.load(part + cell[:, None] * RANK + c[None, :], mask=(c < RANK)[None, :], other=0.0)
    joined = tl.sum(value * scale[:, None], 0) / total
    tl.store(out + head * RANK + c, joined.to(out.dtype.element_ty), mask=c < RANK)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, length: Tensor, scale: float, splits: int | None = None
) -> Tensor:
    """q (rows, heads, rank + rope) over cached keys (pages, 1, rank + rope, page) and values (pages, 1, page, rank),
    which hold the row's newest token already → (rows, heads, rank)."""
    rows, heads, _ = q.shape
    rank, page = values.shape[-1], keys.shape[-1]
    rope = keys.shape[2] - rank
    blocks = triton.cdiv(heads, HEADS)
    splits = splits or _splits(rows * blocks)
    part = torch.empty((rows * heads * splits, rank), dtype=torch.float32, device=q.device)
    stats = torch.empty((rows * heads * splits, 2), dtype=torch.float32, device=q.device)
    _attend[(rows, blocks, splits)](
        q.contiguous(), keys, values, table, length, part, stats, scale, table.stride(0), heads,
        rank, _pad(rank), rope, _pad(rope), page, HEADS, min(page, 32), splits, num_warps=8, num_stages=2,
    )  # fmt: skip
    out = q.new_empty((rows, heads, rank))
    _join[(rows * heads,)](part, stats, out, rank, _pad(rank), splits, num_warps=4)
    return out


def _pad(n: int) -> int:
    return max(int(triton.next_power_of_2(n)), 16)


def _splits(programs: int) -> int:
    splits = 1
    while splits < MOST_SPLITS and programs * splits < PROGRAMS_WANTED:
        splits *= 2
    return splits
