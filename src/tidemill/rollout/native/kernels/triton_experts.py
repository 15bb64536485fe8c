"""A mixture's layer as Triton kernels: choose experts, sort tokens by expert, two grouped products, one sum.

No function here looks at a value on the host, so all of it can be captured in a graph. Pairs of (token, expert) are
laid out expert after expert, each expert's padded to whole blocks of rows: so a program works for one expert alone and
finds it in a table. The number of blocks is bounded by the sizes; programs beyond those in use end at once.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Arguments of a kernel are pointers and constants of Triton's own language, which has no types to name.
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SCAN = 1024  # pairs that are looked at together while they are sorted


@triton.jit
def _route(
    logits, bias, chosen, shares, experts, stride,
    HAS_BIAS: tl.constexpr, SUMS_TO_ONE: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: a softmax over experts, the K largest (after the bias), their shares. The first of equals wins."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < experts
    logit = tl.load(logits + row * stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    score = tl.exp(logit - tl.max(logit, 0))
    score = score / tl.sum(score, 0)
    rank = score
    if HAS_BIAS:
        rank = score + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    rank = tl.where(inside, rank, float("-inf"))
    slot = tl.arange(0, K_PAD)
    found = tl.zeros((K_PAD,), tl.int32)
    share = tl.zeros((K_PAD,), tl.float32)
    for j in tl.static_range(K):
        best = tl.min(tl.where(rank == tl.max(rank, 0), at, BLOCK), 0)
        found = tl.where(slot == j, best, found)
        share = tl.where(slot == j, tl.sum(tl.where(at == best, score, 0.0), 0), share)
        rank = tl.where(at == best, float("-inf"), rank)
    if SUMS_TO_ONE:
        share = share / tl.sum(share, 0)
    tl.store(chosen + row * K + slot, found, mask=slot < K)
    tl.store(shares + row * K + slot, share, mask=slot < K)


@triton.jit
def _count(chosen, counts, pairs, first, SCAN: tl.constexpr):
    """One program per expert: how many pairs are its."""
    expert = tl.program_id(0)
    total = tl.zeros((SCAN,), tl.int32)
    for start in range(0, pairs, SCAN):
        at = start + tl.arange(0, SCAN)
        who = tl.load(chosen + at, mask=at < pairs, other=-1)
        total += (who == expert + first).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, 0))


@triton.jit
def _place(
    chosen, counts, order, owner, used, pairs, first, experts,
    BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, SCAN: tl.constexpr, OWNERS: tl.constexpr,
):  # fmt: skip
    """One program per expert: its pairs go to its blocks of `order`, the rest of which is filled with `pairs`."""
    expert = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    blocks = tl.load(counts + e, mask=e < experts, other=0)
    blocks = (blocks + BLOCK_M - 1) // BLOCK_M
    before = tl.sum(tl.where(e < expert, blocks, 0), 0)
    own = tl.sum(tl.where(e == expert, blocks, 0), 0)
    if expert == 0:
        tl.store(used, tl.sum(blocks, 0))
    for start in range(0, own, OWNERS):
        b = start + tl.arange(0, OWNERS)
        tl.store(owner + before + b, tl.zeros((OWNERS,), tl.int32) + expert, mask=b < own)
    place = before * BLOCK_M
    for start in range(0, pairs, SCAN):
        at = start + tl.arange(0, SCAN)
        is_own = tl.load(chosen + at, mask=at < pairs, other=-1) == expert + first
        rank = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(order + place + rank - 1, at, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), 0)
    rest = place + tl.arange(0, BLOCK_M)
    tl.store(order + rest, tl.zeros((BLOCK_M,), tl.int32) + pairs, mask=rest < (before + own) * BLOCK_M)


@triton.jit
def _up(
    x, weight, out, order, owner, used, pairs, width, inner, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows of one block through their expert's first stack: silu(gate) · up, in the order of blocks."""
    block, column = tl.program_id(0) // COLUMNS, tl.program_id(0) % COLUMNS
    if block >= tl.load(used):
        return
    expert = tl.load(owner + block).to(tl.int64)
    place = block * BLOCK_M + tl.arange(0, BLOCK_M)
    pair = tl.load(order + place)
    row = (pair // k).to(tl.int64)
    is_row = pair < pairs
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    is_n = n < inner
    d = tl.arange(0, BLOCK_K)
    base = weight + expert * (2 * inner * width)
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, width, BLOCK_K):
        is_d = start + d < width
        a = tl.load(x + row[:, None] * width + (start + d)[None, :], mask=is_row[:, None] & is_d[None, :], other=0.0)
        where = n[None, :] * width + (start + d)[:, None]
        inside = is_d[:, None] & is_n[None, :]
        g = tl.load(base + where, mask=inside, other=0.0)
        u = tl.load(base + inner * width + where, mask=inside, other=0.0)
        gate = tl.dot(a, g, gate, input_precision="ieee")
        up = tl.dot(a, u, up, input_precision="ieee")
    made = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + place.to(tl.int64)[:, None] * inner + n[None, :], made.to(out.dtype.element_ty), mask=is_n[None, :])


@triton.jit
def _down(
    x, weight, shares, out, order, owner, used, pairs, width, inner,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows of one block through their expert's second stack, times their shares, to the pairs' own places."""
    block, column = tl.program_id(0) // COLUMNS, tl.program_id(0) % COLUMNS
    if block >= tl.load(used):
        return
    expert = tl.load(owner + block).to(tl.int64)
    place = block * BLOCK_M + tl.arange(0, BLOCK_M)
    pair = tl.load(order + place)
    is_row = pair < pairs
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    is_n = n < width
    d = tl.arange(0, BLOCK_K)
    base = weight + expert * (inner * width)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, inner, BLOCK_K):
        is_d = start + d < inner
        a = tl.load(x + place.to(tl.int64)[:, None] * inner + (start + d)[None, :], mask=is_d[None, :], other=0.0)
        w = tl.load(base + n[None, :] * inner + (start + d)[:, None], mask=is_d[:, None] & is_n[None, :], other=0.0)
        acc = tl.dot(a, w, acc, input_precision="ieee")
    share = tl.load(shares + pair, mask=is_row, other=0.0)
    made = (acc * share[:, None]).to(out.dtype.element_ty)
    tl.store(out + pair.to(tl.int64)[:, None] * width + n[None, :], made, mask=is_row[:, None] & is_n[None, :])


@triton.jit
def _sum(made, chosen, x, width, first, held, K: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr):
    """x += what the experts of each token made; those held by other ranks made nothing here."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(K):
        is_here = inside
        if not ALL:
            who = tl.load(chosen + row * K + j) - first
            is_here = inside & (who >= 0) & (who < held)
        total += tl.load(made + (row * K + j) * width + at, mask=is_here, other=0.0).to(tl.float32)
    tl.store(x + row * width + at, total.to(x.dtype.element_ty), mask=inside)


class Tiles(NamedTuple):
    """How one grouped product is cut."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


def tiles_for(pairs: int, experts: int) -> tuple[Tiles, Tiles]:
    """Of the two products, by how many rows an expert gets on average: few rows are bound by reading weights, which an
    expert with more than one block of rows reads again, so blocks have room for twice the average. Measured on an H200
    (`benchmarks/gpu_mixture.py`)."""
    rows = -(-pairs // experts)
    if rows <= 8:
        tile = Tiles(16, 64, 128, 4, 3)
    elif rows <= 24:
        tile = Tiles(32, 64, 128, 4, 3)
    elif rows <= 48:
        tile = Tiles(64, 64, 64, 4, 4)
    else:
        tile = Tiles(128, 128, 64, 8, 3)
    return tile, tile


def route(logits: Tensor, bias: Tensor | None, k: int, sums_to_one: bool) -> tuple[Tensor, Tensor]:
    """logits (tokens, experts) → the experts chosen (tokens, k), int32, and their shares, float32."""
    tokens, experts = logits.shape
    chosen = torch.empty((tokens, k), dtype=torch.int32, device=logits.device)
    shares = torch.empty((tokens, k), dtype=torch.float32, device=logits.device)
    block, k_pad = triton.next_power_of_2(experts), triton.next_power_of_2(k)
    _route[(tokens,)](
        logits, logits if bias is None else bias, chosen, shares, experts, logits.stride(0), bias is not None,
        sums_to_one, k, k_pad, block, num_warps=1 if block <= 128 else 2,
    )  # fmt: skip
    return chosen, shares


def add_experts(
    x: Tensor, h: Tensor, chosen: Tensor, shares: Tensor, stacks: tuple[Tensor, Tensor], first: int = 0,
    is_whole: bool = True, tiles: tuple[Tiles, Tiles] | None = None,
) -> None:  # fmt: skip
    """x += Σ share · expert(h) over the chosen experts of each token. Unless `is_whole`, the stacks are those of some
    experts, from `first` on, and the others add nothing."""
    gate_up, down = stacks
    held, width, inner = down.shape
    (tokens, k), pairs = chosen.shape, chosen.numel()
    up_tiles, down_tiles = tiles or tiles_for(pairs, held)
    m, device = up_tiles.m, x.device
    most = min(pairs, triton.cdiv(pairs, m) + held)  # an expert's last block may be part empty
    table = torch.empty(held + 1 + most, dtype=torch.int32, device=device)
    counts, used, owner = table[:held], table[held : held + 1], table[held + 1 :]
    order = torch.empty(most * m, dtype=torch.int32, device=device)
    _count[(held,)](chosen, counts, pairs, first, SCAN, num_warps=4)
    _place[(held,)](
        chosen, counts, order, owner, used, pairs, first, held, m, triton.next_power_of_2(held), SCAN, 64, num_warps=4
    )
    inside = h.new_empty((most * m, inner))
    columns = triton.cdiv(inner, up_tiles.n)
    _up[(most * columns,)](
        h, gate_up, inside, order, owner, used, pairs, width, inner, k,
        m, up_tiles.n, up_tiles.k, columns, num_warps=up_tiles.warps, num_stages=up_tiles.stages,
    )  # fmt: skip
    made = h.new_empty((pairs, width))
    columns = triton.cdiv(width, down_tiles.n)
    _down[(most * columns,)](
        inside, down, shares, made, order, owner, used, pairs, width, inner,
        m, down_tiles.n, down_tiles.k, columns, num_warps=down_tiles.warps, num_stages=down_tiles.stages,
    )  # fmt: skip
    block = min(triton.next_power_of_2(width), 1024)
    _sum[(tokens, triton.cdiv(width, block))](made, chosen, x, width, first, held, k, block, is_whole, num_warps=4)
