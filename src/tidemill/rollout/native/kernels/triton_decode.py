"""The parts of a decode step that are not matrix products, for accelerators that Triton compiles for.

The same arithmetic as `kernels.c`, and the same names: a step of the lean runner is nine launches a layer, and the draw
reads the logits once. No function here looks at a value on the host, so all of it can be captured in a graph.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Arguments of a kernel are pointers and constants of Triton's own language, which has no types to name.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tidemill.models.attention.registry import AttentionForm
from tidemill.models.layers.eight import LEAST_SCALE, Rounded
from tidemill.rollout.native.draw import triton_draw
from tidemill.rollout.native.kernels import triton_experts, triton_latent

# Programs wanted before a sequence is split over several, and the most parts it is split into.
PROGRAMS_WANTED = 4 * 132
MOST_SPLITS = 16


@triton.jit
def _rms(x, weight, out, eps, shift, dim, BLOCK_DIM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK_DIM)
    inside = at < dim
    value = tl.load(x + row * dim + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / dim + eps)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + shift
    tl.store(out + row * dim + at, (value * scale * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rms_rounded(x, weight, code, scales, eps, dim, most, least, HAS_NORM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """A row, normed or as it is, in 8-bit floats with a scale of its own."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK_DIM)
    inside = at < dim
    value = tl.load(x + row * dim + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        value = value * (1.0 / tl.sqrt(tl.sum(value * value, 0) / dim + eps)) * w
        value = value.to(x.dtype.element_ty).to(tl.float32)  # as the norm alone would leave it
    scale = tl.maximum(tl.max(tl.abs(value), 0), least) / most
    tl.store(code + row * dim + at, (value / scale).to(code.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _gate_rounded(x, code, scales, half, most, least, BLOCK_DIM: tl.constexpr):
    """x (rows, 2 * half): silu(first half) * second half, in 8-bit floats with a scale per row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK_DIM)
    inside = at < half
    gate = tl.load(x + row * 2 * half + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * half + half + at, mask=inside, other=0.0).to(tl.float32)
    value = (gate / (1.0 + tl.exp(-gate)) * up).to(x.dtype.element_ty).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0), least) / most
    tl.store(code + row * half + at, (value / scale).to(code.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _rotate(
    x, q_norm, k_norm, cos, sin, position, stride, eps, q_heads, heads,
    HAS_NORM: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """Heads 0..heads of each row of x, in place; the first `q_heads` are queries, the others keys."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    at = tl.arange(0, BLOCK_HALF)
    inside = (head[:, None] < heads) & (at[None, :] < HALF)
    where = row * stride + head[:, None] * DIM + at[None, :]
    a = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + where + HALF, mask=inside, other=0.0).to(tl.float32)
    in_half = at < HALF
    if HAS_NORM:
        scale = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)
        is_query = (head < q_heads)[:, None]
        wq_a = tl.load(q_norm + at, mask=in_half, other=0.0).to(tl.float32)[None, :]
        wq_b = tl.load(q_norm + HALF + at, mask=in_half, other=0.0).to(tl.float32)[None, :]
        wk_a = tl.load(k_norm + at, mask=in_half, other=0.0).to(tl.float32)[None, :]
        wk_b = tl.load(k_norm + HALF + at, mask=in_half, other=0.0).to(tl.float32)[None, :]
        a = a * scale[:, None] * tl.where(is_query, wq_a, wk_a)
        b = b * scale[:, None] * tl.where(is_query, wq_b, wk_b)
    table = tl.load(position + row) * DIM
    c_a = tl.load(cos + table + at, mask=in_half, other=0.0).to(tl.float32)[None, :]
    c_b = tl.load(cos + table + HALF + at, mask=in_half, other=0.0).to(tl.float32)[None, :]
    s_a = tl.load(sin + table + at, mask=in_half, other=0.0).to(tl.float32)[None, :]
    s_b = tl.load(sin + table + HALF + at, mask=in_half, other=0.0).to(tl.float32)[None, :]
    tl.store(x + where, (a * c_a + b * s_a).to(x.dtype.element_ty), mask=inside)
    tl.store(x + where + HALF, (b * c_b + a * s_b).to(x.dtype.element_ty), mask=inside)


@triton.jit
def _norm_rotate(
    x, out, norm, cos, sin, position, row_stride, head_stride, eps, shift, heads,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """One head of one row: normed, its first TURNED numbers turned, the others as they are."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, DIM_PAD)
    inside, turns = at < DIM, at < TURNED
    own = x + row * row_stride + head * head_stride
    value = tl.load(own + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / DIM + eps)
    value = value * scale * (tl.load(norm + at, mask=inside, other=0.0).to(tl.float32) + shift)
    # The number that each is turned with lies half of the turned part away.
    other_at = tl.where(at < TURNED // 2, at + TURNED // 2, at - TURNED // 2)
    other = tl.load(own + other_at, mask=turns, other=0.0).to(tl.float32)
    other = other * scale * (tl.load(norm + other_at, mask=turns, other=0.0).to(tl.float32) + shift)
    table = tl.load(position + row) * TURNED
    c = tl.load(cos + table + at, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + table + at, mask=turns, other=0.0).to(tl.float32)
    tl.store(out + (row * heads + head) * DIM + at, (value * c + other * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate(x, out, half, BLOCK_DIM: tl.constexpr):
    """x (rows, 2 * half): out = silu(first half) * second half."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    inside = at < half
    gate = tl.load(x + row * 2 * half + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * half + half + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * half + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _attend_block(
    first, n, seen_from, row, head, query, new_k, new_v, keys, values, k_scale, v_scale, table, table_stride, scale,
    softcap, peak, total, acc, IS_LAST: tl.constexpr, NARROW: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, V_DIM: tl.constexpr,
    V_PAD: tl.constexpr, PAGE: tl.constexpr, IS_LOCAL: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Positions first..first + BLOCK_N into the running softmax. The last block may end early and holds the new token,
    which is not in the cache yet."""
    d, e = tl.arange(0, DIM_PAD), tl.arange(0, V_PAD)
    at = first + tl.arange(0, BLOCK_N)
    # A block lies within one page, so that its addresses are one base and a regular pattern.
    base = tl.load(table + row * table_stride + first // PAGE).to(tl.int64) * KV_HEADS + head
    inner = tl.multiple_of(first % PAGE, BLOCK_N) + tl.arange(0, BLOCK_N)
    k_at = keys + base * (DIM * PAGE) + d[:, None] * PAGE + inner[None, :]
    v_at = values + base * (PAGE * V_DIM) + inner[:, None] * V_DIM + e[None, :]
    if IS_LAST:
        is_old, is_new = at < n - 1, at == n - 1
        key = tl.load(k_at, mask=is_old[None, :] & (d < DIM)[:, None], other=0.0).to(query.dtype)
        key = tl.where(is_new[None, :], new_k[:, None], key)
        value = tl.load(v_at, mask=is_old[:, None] & (e < V_DIM)[None, :], other=0.0).to(query.dtype)
        value = tl.where(is_new[:, None], new_v[None, :], value)
    else:
        key = tl.load(k_at) if DIM == DIM_PAD else tl.load(k_at, mask=(d < DIM)[:, None], other=0.0)
        value = tl.load(v_at) if V_DIM == V_PAD else tl.load(v_at, mask=(e < V_DIM)[None, :], other=0.0)
        key, value = key.to(query.dtype), value.to(query.dtype)
    # "ieee": float32 stays float32; bfloat16 products are exact either way.
    score = tl.dot(query, key, input_precision="ieee") * scale
    if NARROW:  # a position's scale is a factor of its score, and below of its weight; the new token is whole
        k_factor = tl.load(k_scale + base * PAGE + inner)
        v_factor = tl.load(v_scale + base * PAGE + inner)
        if IS_LAST:
            k_factor, v_factor = tl.where(is_new, 1.0, k_factor), tl.where(is_new, 1.0, v_factor)
        score = score * k_factor[None, :]
    if HAS_CAP:
        score = (2.0 / (1.0 + tl.exp(-2.0 * score / softcap)) - 1.0) * softcap
    if IS_LAST or IS_LOCAL:
        seen = at < n
        if IS_LOCAL:
            seen = seen & (at >= seen_from)
        score = tl.where(seen[None, :], score, -1e30)
    higher = tl.maximum(peak, tl.max(score, 1))
    fade = tl.exp(peak - higher)
    weight = tl.exp(score - higher[:, None])
    if IS_LOCAL:  # a block may lie wholly before what is seen, where every score equals its maximum
        weight = tl.where(score > -1e29, weight, 0.0)
    total = total * fade + tl.sum(weight, 1)
    if NARROW:
        weight = weight * v_factor[None, :]
    acc = acc * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    return higher, total, acc


@triton.jit
def _narrow(x, most, ROUND: tl.constexpr):
    """`cache.narrow` of one row: its elements as the narrow type takes them, and their scale."""
    wide = x.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), 0), 1e-12) / most
    scaled = wide / scale
    if ROUND:
        scaled = tl.floor(scaled + 0.5)
    return scaled, scale


@triton.jit
def _append(
    base, place, d, e, new_k, new_v, keys, values, k_scale, v_scale, most, NARROW: tl.constexpr, ROUND: tl.constexpr,
    DIM: tl.constexpr, V_DIM: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Write one head's new key and value at a place of the page that begins at `base`."""
    cell = base * PAGE + place
    slot = base * (DIM * PAGE) + d * PAGE + place
    in_d, in_e = d < DIM, e < V_DIM
    if NARROW:
        thin_k, k_factor = _narrow(new_k, most, ROUND)
        thin_v, v_factor = _narrow(new_v, most, ROUND)
        tl.store(k_scale + cell, k_factor)
        tl.store(v_scale + cell, v_factor)
        tl.store(keys + slot, thin_k.to(keys.dtype.element_ty), mask=in_d)
        tl.store(values + cell * V_DIM + e, thin_v.to(values.dtype.element_ty), mask=in_e)
    else:
        tl.store(keys + slot, new_k.to(keys.dtype.element_ty), mask=in_d)
        tl.store(values + cell * V_DIM + e, new_v.to(values.dtype.element_ty), mask=in_e)


@triton.jit
def _attend(
    q, k, v, keys, values, k_scale, v_scale, table, length, out, part, stats, sinks, scale, softcap, most,
    q_stride, k_stride, v_stride, table_stride, NARROW: tl.constexpr, ROUND: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One new token per row: its key and value go to its page, and its queries see everything the row has.

    A program serves the query heads of one key/value head, over one of SPLITS parts of the sequence. The program that
    has the last position writes the new key and value; nobody else reads that position from the cache.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    n = tl.load(length + row)
    seen_from = 0
    if WINDOW > 0:
        seen_from = tl.maximum(n - WINDOW, 0)
    if CHUNK > 0:
        seen_from = (n - 1) // CHUNK * CHUNK
    low = seen_from // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(n - low, SPLITS), BLOCK_N) * BLOCK_N
    start = low + split * share
    stop = tl.minimum(start + share, n)

    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, DIM_PAD)
    e = tl.arange(0, V_PAD)
    in_d, in_e = d < DIM, e < V_DIM
    query = tl.load(
        q + row * q_stride + (head * GROUP + g)[:, None] * DIM + d[None, :],
        mask=(g < GROUP)[:, None] & in_d[None, :], other=0.0,
    )  # fmt: skip
    new_k = tl.load(k + row * k_stride + head * DIM + d, mask=in_d, other=0.0)
    new_v = tl.load(v + row * v_stride + head * V_DIM + e, mask=in_e, other=0.0)
    peak = tl.full((GROUP_PAD,), -1e30, tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head * GROUP + g, mask=g < GROUP, other=-1e30).to(tl.float32)
        is_first = (g < GROUP) & (split == 0)  # of the parts: it has one score more, worth nothing
        peak, total = tl.where(is_first, sink, peak), tl.where(is_first, 1.0, total)
    acc = tl.zeros((GROUP_PAD, V_PAD), tl.float32)
    # Whole blocks of cached positions first: no masks, so that loads run ahead of the products.
    whole = start + tl.maximum(tl.minimum(stop, n - 1) - start, 0) // BLOCK_N * BLOCK_N
    for first in range(start, whole, BLOCK_N):
        peak, total, acc = _attend_block(
            first, n, seen_from, row, head, query, new_k, new_v, keys, values, k_scale, v_scale, table, table_stride,
            scale, softcap, peak, total, acc, False, NARROW, KV_HEADS, DIM, DIM_PAD, V_DIM, V_PAD, PAGE,
            (WINDOW + CHUNK) > 0, HAS_CAP, BLOCK_N,
        )  # fmt: skip
    if whole < stop:
        peak, total, acc = _attend_block(
            whole, n, seen_from, row, head, query, new_k, new_v, keys, values, k_scale, v_scale, table, table_stride,
            scale, softcap, peak, total, acc, True, NARROW, KV_HEADS, DIM, DIM_PAD, V_DIM, V_PAD, PAGE,
            (WINDOW + CHUNK) > 0, HAS_CAP, BLOCK_N,
        )  # fmt: skip

    if (start < n) & (stop == n):
        page = tl.load(table + row * table_stride + (n - 1) // PAGE).to(tl.int64)
        _append(
            page * KV_HEADS + head, (n - 1) % PAGE, d, e, new_k, new_v, keys, values, k_scale, v_scale, most,
            NARROW, ROUND, DIM, V_DIM, PAGE,
        )  # fmt: skip

    inside = (g < GROUP)[:, None] & in_e[None, :]
    if SPLITS == 1:
        where = (row * KV_HEADS * GROUP + head * GROUP + g)[:, None] * V_DIM + e[None, :]
        tl.store(out + where, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        cell = ((row * KV_HEADS + head) * SPLITS + split) * GROUP + g
        tl.store(part + cell[:, None] * V_DIM + e[None, :], acc, mask=inside)
        tl.store(stats + cell * 2, peak, mask=g < GROUP)
        tl.store(stats + cell * 2 + 1, total, mask=g < GROUP)


@triton.jit
def _join(part, stats, out, GROUP: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr, SPLITS: tl.constexpr):
    """The parts of one query head, weighed by their sums."""
    head = tl.program_id(0).to(tl.int64)
    kv, g = head // GROUP, head % GROUP
    s = tl.arange(0, SPLITS)
    e = tl.arange(0, V_PAD)
    cell = (kv * SPLITS + s) * GROUP + g
    peak = tl.load(stats + cell * 2)
    total = tl.load(stats + cell * 2 + 1)
    scale = tl.exp(peak - tl.max(peak, 0))
    value = tl.load(part + cell[:, None] * V_DIM + e[None, :], mask=(e < V_DIM)[None, :], other=0.0)
    joined = tl.sum(value * scale[:, None], 0) / tl.sum(total * scale, 0)
    tl.store(out + head * V_DIM + e, joined.to(out.dtype.element_ty), mask=e < V_DIM)


def _pad(n: int) -> int:
    return max(int(triton.next_power_of_2(n)), 16)


class TritonKernels:
    """Implements `fused.FusedKernels`. `block`: positions of the cache that attention handles at once, where a page has
    as many; pages and blocks are powers of two. The defaults are the fastest of thirteen measured on an H200."""

    def __init__(self, block: int = 32, warps: int = 2, stages: int = 5) -> None:
        self.block, self.warps, self.stages = block, warps, stages
        self.draw, self.draw_truncated = triton_draw.draw, triton_draw.draw_truncated
        self.draw_steered = triton_draw.draw_steered
        self.route, self.add_experts = triton_experts.route, triton_experts.add_experts

    def rms(self, x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
        """`shift`: what is added to the weight, of norms that count from 1."""
        out = torch.empty_like(x)
        dim = x.shape[-1]
        block = triton.next_power_of_2(dim)
        _rms[(x.numel() // dim,)](x, weight, out, eps, shift, dim, block, num_warps=4 if block <= 4096 else 8)
        return out

    def norm_rotate(
        self, x: Tensor, stride: int, norm: Tensor, shift: float, cos: Tensor, sin: Tensor, position: Tensor, eps: float
    ) -> Tensor:
        """x (tokens, heads, …), of which each head has `norm.shape` numbers and begins `stride` after the one before:
        normed, and the first numbers turned, as many as the tables have. (tokens, heads, dim)"""
        (tokens, heads), dim, turned = x.shape[:2], norm.shape[0], cos.shape[-1]
        out = torch.empty(tokens, heads, dim, dtype=x.dtype, device=x.device)
        _norm_rotate[(tokens, heads)](
            x, out, norm, cos, sin, position, x.stride(0), stride, eps, shift, heads,
            dim, triton.next_power_of_2(dim), turned, num_warps=2,
        )  # fmt: skip
        return out

    def rounded(self, x: Tensor, dtype: torch.dtype) -> Rounded:
        return self._round(x, None, 0.0, dtype)

    def rms_rounded(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Rounded:
        return self._round(x, weight, eps, dtype)

    def _round(self, x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> Rounded:
        rows, dim = x.shape
        code, scale = torch.empty_like(x, dtype=dtype), x.new_empty(rows, dtype=torch.float32)
        block, most = triton.next_power_of_2(dim), torch.finfo(dtype).max
        _rms_rounded[(rows,)](
            x, x if weight is None else weight, code, scale, eps, dim, most, LEAST_SCALE, weight is not None, block,
            num_warps=4 if block <= 4096 else 8,
        )  # fmt: skip
        return Rounded(code, scale, x.dtype)

    def gate_rounded(self, x: Tensor, dtype: torch.dtype) -> Rounded:
        """`gate`, rounded."""
        rows, half = x.shape[0], x.shape[1] // 2
        code, scale = x.new_empty(rows, half, dtype=dtype), x.new_empty(rows, dtype=torch.float32)
        block, most = triton.next_power_of_2(half), torch.finfo(dtype).max
        _gate_rounded[(rows,)](x, code, scale, half, most, LEAST_SCALE, block, num_warps=4 if block <= 4096 else 16)
        return Rounded(code, scale, x.dtype)

    def turns(self, cos: Tensor, sin: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        """What `rotate` needs to know of a pass: whole tables, and each token's row in them."""
        return cos, sin, position

    def rotate(
        self, x: Tensor, heads: tuple[int, int], norms: tuple[Tensor, Tensor] | None, turns: tuple[Tensor, ...],
        eps: float,
    ) -> None:  # fmt: skip
        """x (tokens, width) in place: its first `heads` = (queries, keys) heads are normed and turned."""
        cos, sin, position = turns
        dim, both = cos.shape[-1], sum(heads)
        block = min(triton.next_power_of_2(both), 16)
        grid = (x.shape[0], triton.cdiv(both, block))
        q_norm, k_norm = norms or (cos, cos)
        _rotate[grid](
            x, q_norm, k_norm, cos, sin, position, x.stride(0), eps, heads[0], both,
            norms is not None, dim, dim // 2, triton.next_power_of_2(dim // 2), block, num_warps=4,
        )  # fmt: skip

    def gate(self, x: Tensor) -> Tensor:
        """x (tokens, 2 * width): silu(first half) * second half."""
        rows, half = x.shape[0], x.shape[1] // 2
        out = x.new_empty(rows, half)
        _gate[(rows, triton.cdiv(half, 1024))](x, out, half, 1024, num_warps=4)
        return out

    def reads_cache(self, k: Tensor, v: Tensor) -> bool:
        """True for a latent cache, whose keys are wider than any head's."""
        return k.shape[1] == 1 and k.shape[2] > v.shape[2]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, table: Tensor, length: Tensor,
        form: AttentionForm, splits: int | None = None, scales: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """q (rows, heads, dim), k and v (rows, kv_heads, dim) with heads side by side; `table` (rows, pages). With
        `scales` of keys and values, these are one byte an element."""
        if self.reads_cache(k, v) and scales is None and form == AttentionForm(form.scale):
            return triton_latent.attend(q, keys, values, table, length, form.scale, splits)
        rows, heads, dim = q.shape
        kv_heads, v_dim = v.shape[1:]
        group, page = heads // kv_heads, keys.shape[-1]
        splits = splits or splits_for(rows * kv_heads)
        out = q.new_empty(rows, heads, v_dim)
        part = stats = out
        if splits > 1:
            part = torch.empty(rows * heads * splits * v_dim, dtype=torch.float32, device=q.device)
            stats = torch.empty(rows * heads * splits * 2, dtype=torch.float32, device=q.device)
        _attend[(rows, kv_heads, splits)](
            q, k, v, keys, values, *(scales or (out, out)), table, length, out, part, stats,
            out if form.sinks is None else form.sinks, form.scale, form.softcap or 1.0,
            127.0 if keys.dtype == torch.int8 else 448.0,
            q.stride(0), k.stride(0), v.stride(0), table.stride(0), scales is not None, keys.dtype == torch.int8,
            kv_heads, group, _pad(group), dim, _pad(dim), v_dim, _pad(v_dim),
            page, form.window or 0, form.chunk or 0, form.softcap is not None, form.sinks is not None, splits,
            min(self.block, page),
            num_warps=self.warps, num_stages=self.stages,
        )  # fmt: skip
        if splits > 1:
            _join[(rows * heads,)](part, stats, out, group, v_dim, _pad(v_dim), splits, num_warps=2)
        return out


def splits_for(programs: int) -> int:
    """A power of two of parts per sequence, so that few sequences still fill the device."""
    splits = 1
    while splits < MOST_SPLITS and programs * splits < PROGRAMS_WANTED:
        splits *= 2
    return splits
