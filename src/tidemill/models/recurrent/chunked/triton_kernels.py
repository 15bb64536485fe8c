"""Triton kernels of the gated delta rule. Each computes what the plain torch of its caller does; none looks at a value
on the host, so all of it can be captured in a graph."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Arguments of a kernel are pointers and constants of Triton's own language, which has no types to name.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_TOKENS, BLOCK_CHANNELS = 16, 64
BLOCK_STATE = 32  # columns of a state that one program takes along a sequence
SPLITS = 64  # parts of a row whose sums of a convolution's weight gradient are added up at the end


def fits(*sizes: int) -> bool:
    """Whether heads of these sizes can be blocks of products."""
    return all(size >= 16 and size & (size - 1) == 0 for size in sizes)


@triton.jit
def _conv(x, weight, index, out, tokens, channels, WIDTH: tl.constexpr,
          BT: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """out[t, c] = Σ_j weight[c, j] x[index[t, j], c] over the indices that are not negative."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    in_t, in_c = t < tokens, c < channels
    total = tl.zeros((BT, BC), tl.float32)
    for tap in range(WIDTH):
        at = tl.load(index + t.to(tl.int64) * WIDTH + tap, mask=in_t, other=-1)
        seen = (at >= 0)[:, None] & in_c[None, :]
        row = tl.load(x + at.to(tl.int64)[:, None] * channels + c[None, :], mask=seen, other=0.0).to(tl.float32)
        w = tl.load(weight + c * WIDTH + tap, mask=in_c, other=0.0).to(tl.float32)
        total += row * w[None, :]
    where = t.to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(out + where, total.to(out.dtype.element_ty), mask=in_t[:, None] & in_c[None, :])


@triton.jit
def _conv_weight(grad, x, index, out, tokens, share, channels, WIDTH: tl.constexpr,
                 BT: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """out[split, j, c] = Σ_t grad[t, c] x[index[t, j], c] of one split's tokens."""
    split = tl.program_id(0)
    tap = tl.program_id(1)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    in_c = c < channels
    total = tl.zeros((BC,), tl.float32)
    for first in range(split * share, tl.minimum((split + 1) * share, tokens), BT):
        t = first + tl.arange(0, BT)
        in_t = (t < tokens) & (t < (split + 1) * share)
        at = tl.load(index + t.to(tl.int64) * WIDTH + tap, mask=in_t, other=-1)
        inside = (at >= 0)[:, None] & in_c[None, :]
        row = tl.load(x + at.to(tl.int64)[:, None] * channels + c[None, :], mask=inside, other=0.0).to(tl.float32)
        made = tl.load(grad + t.to(tl.int64)[:, None] * channels + c[None, :], mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(row * made, 0)
    tl.store(out + (split * WIDTH + tap) * channels + c, total, mask=in_c)


def conv(x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    tokens, width = index.shape
    out = x.new_empty(tokens, x.shape[1])
    grid = (triton.cdiv(tokens, BLOCK_TOKENS), triton.cdiv(x.shape[1], BLOCK_CHANNELS))
    _conv[grid](
        x, weight, index, out, tokens, x.shape[1], width, BLOCK_TOKENS, BLOCK_CHANNELS, num_warps=4
    )  # fmt: skip
    return out


def conv_backward(grad: Tensor, x: Tensor, weight: Tensor, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Of x within segments, and of the weight, float32."""
    grad_x = conv(grad, weight, target)
    (tokens, width), channels = source.shape, x.shape[1]
    share = triton.cdiv(triton.cdiv(tokens, SPLITS), BLOCK_TOKENS) * BLOCK_TOKENS
    parts = torch.empty(SPLITS, width, channels, dtype=torch.float32, device=x.device)
    grid = (SPLITS, width, triton.cdiv(channels, BLOCK_CHANNELS))
    _conv_weight[grid](
        grad, x, source, parts, tokens, share, channels, width, BLOCK_TOKENS, BLOCK_CHANNELS, num_warps=4
    )
    return grad_x, parts.sum(0).t()


@triton.jit
def _recur(
    y, left, right, decay, begins, ends_at, added, before, made, last, heads,
    DK: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr, BV: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """One head's columns of one sequence, chunk after chunk."""
    part, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, stop = tl.load(ends_at + sequence), tl.load(ends_at + sequence + 1)
    d, t = tl.arange(0, DK), tl.arange(0, CHUNK)
    v = part * BV + tl.arange(0, BV)
    state_at = d[:, None] * DV + v[None, :]
    row_at = t[:, None] * DV + v[None, :]
    wide_at = t[:, None] * DK + d[None, :]
    own = (sequence * heads + head).to(tl.int64) * DK * DV
    x = tl.load(begins + own + state_at).to(tl.float32)
    for step in range(stop - first):
        chunk = first + step
        if BACKWARD:
            chunk = stop - 1 - step
        at = (chunk * heads + head).to(tl.int64)
        tl.store(before + at * DK * DV + state_at, x.to(before.dtype.element_ty))
        a = tl.load(left + at * CHUNK * DK + wide_at)
        b = tl.load(right + at * CHUNK * DK + wide_at)
        change = tl.load(y + at * CHUNK * DV + row_at).to(tl.float32)
        # "ieee": float32 stays float32; 16-bit products are exact either way.
        change += tl.dot(a, x.to(a.dtype), input_precision="ieee")
        tl.store(made + at * CHUNK * DV + row_at, change.to(made.dtype.element_ty))
        x = x * tl.load(decay + at) + tl.dot(tl.trans(b), change.to(b.dtype), input_precision="ieee")
        if BACKWARD:
            x += tl.load(added + at * DK * DV + state_at).to(tl.float32)
    tl.store(last + own + state_at, x)


def recur(
    y: Tensor, left: Tensor, right: Tensor, decay: Tensor, begins: Tensor, ends_at: Tensor, added: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    chunks, heads, chunk, dv = y.shape
    dk, sequences = left.shape[-1], begins.shape[0]
    before, made, last = y.new_empty(chunks, heads, dk, dv), torch.empty_like(y), torch.empty_like(begins)
    block = min(BLOCK_STATE, dv)
    _recur[(dv // block, heads, sequences)](
        y.contiguous(), left.contiguous(), right.contiguous(), decay.contiguous(), begins.contiguous(), ends_at,
        before if added is None else added.contiguous(), before, made, last, heads, dk, dv, chunk, block,
        added is not None, num_warps=4, num_stages=2,
    )  # fmt: skip
    return before, made, last


@triton.jit
def _inverse(a, out, SIZE: tl.constexpr):
    """Row by row: row i of the inverse is e_i less the rows above, weighed by row i of a."""
    at = tl.program_id(0).to(tl.int64) * SIZE * SIZE
    i, j = tl.arange(0, SIZE), tl.arange(0, SIZE)
    whole = tl.where(i[:, None] == j[None, :], 1.0, 0.0)
    for row in range(1, SIZE):
        weights = tl.load(a + at + row * SIZE + j, mask=j < row, other=0.0)  # of the rows above
        above = tl.sum(weights[:, None] * whole, 0)
        whole = tl.where((i == row)[:, None], whole - above[None, :], whole)
    tl.store(out + at + i[:, None] * SIZE + j[None, :], whole)


def inverse_of_unit_lower(a: Tensor) -> Tensor:
    out, size = torch.empty_like(a), a.shape[-1]
    _inverse[(a.numel() // (size * size),)](a.contiguous(), out, size, num_warps=4)
    return out


@triton.jit
def _conv_step(x, weight, conv, slots, out, channels, WIDTH: tl.constexpr, BC: tl.constexpr):
    """One input more of each row's channels: the state moves on by one, and out is silu of the convolution."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < channels
    slot = tl.load(slots + row).to(tl.int64)
    held = conv + (slot * channels + c) * WIDTH
    new = tl.load(x + row * channels + c, mask=inside, other=0.0)
    total = new.to(tl.float32) * tl.load(weight + c * WIDTH + WIDTH - 1, mask=inside, other=0.0).to(tl.float32)
    for tap in range(WIDTH - 1):
        past = tl.load(held + tap + 1, mask=inside, other=0.0)
        total += past.to(tl.float32) * tl.load(weight + c * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
        tl.store(held + tap, past, mask=inside)
    tl.store(held + WIDTH - 1, new.to(conv.dtype.element_ty), mask=inside)
    tl.store(out + row * channels + c, (total / (1.0 + tl.exp(-total))).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _delta_step(
    mixed, z, b, a, delta, slots, log_a, dt_bias, norm, out, z_stride, b_stride, a_stride, scale, eps, norm_eps,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """One head of one row: its state moves on by one token; out is the head's output, normed and gated."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    d, v = tl.arange(0, DK), tl.arange(0, DV)
    own = mixed + row * (2 * K_HEADS * DK + V_HEADS * DV)
    k_head = head // (V_HEADS // K_HEADS)
    q = tl.load(own + k_head * DK + d).to(tl.float32)
    k = tl.load(own + (K_HEADS + k_head) * DK + d).to(tl.float32)
    value = tl.load(own + 2 * K_HEADS * DK + head * DV + v).to(tl.float32)
    q = q * (scale / tl.sqrt(tl.sum(q * q, 0) + eps))
    k = k / tl.sqrt(tl.sum(k * k, 0) + eps)
    # Rounded as the module rounds them between its operations.
    q, k = q.to(mixed.dtype.element_ty).to(tl.float32), k.to(mixed.dtype.element_ty).to(tl.float32)
    beta = 1.0 / (1.0 + tl.exp(-tl.load(b + row * b_stride + head).to(tl.float32)))
    time = tl.load(a + row * a_stride + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    time = tl.where(time > 20.0, time, tl.log(1.0 + tl.exp(tl.minimum(time, 20.0))))  # softplus
    decay = tl.exp(-tl.exp(tl.load(log_a + head).to(tl.float32)) * time)
    at = delta + (slot * V_HEADS + head) * DK * DV + d[:, None] * DV + v[None, :]
    state = tl.load(at).to(tl.float32) * decay
    change = (value - tl.sum(state * k[:, None], 0)) * beta
    state += k[:, None] * change[None, :]
    tl.store(at, state.to(delta.dtype.element_ty))
    made = tl.sum(state * q[:, None], 0).to(out.dtype.element_ty).to(tl.float32)
    made = made / tl.sqrt(tl.sum(made * made, 0) / DV + norm_eps)
    made = made.to(out.dtype.element_ty).to(tl.float32) * tl.load(norm + v).to(tl.float32)
    gate = tl.load(z + row * z_stride + head * DV + v).to(tl.float32)
    made = made.to(out.dtype.element_ty).to(tl.float32) * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out + (row * V_HEADS + head) * DV + v, made.to(out.dtype.element_ty))


def step(
    qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, conv: Tensor, delta: Tensor, slots: Tensor, weight: Tensor,
    log_a: Tensor, dt_bias: Tensor, norm: Tensor, heads: tuple[int, int], norm_eps: float,
) -> Tensor:  # fmt: skip
    """What `layer.step` does between the projections, in two launches. qkv, z, b and a may be parts of wider rows."""
    (rows, channels), (k_heads, v_heads) = qkv.shape, heads
    dk, dv = delta.shape[2:]
    mixed = torch.empty(rows, channels, dtype=qkv.dtype, device=qkv.device)
    _conv_step[(rows, triton.cdiv(channels, 512))](
        qkv.contiguous(), weight, conv, slots, mixed, channels, weight.shape[1], 512, num_warps=4
    )
    out = torch.empty(rows, v_heads * dv, dtype=qkv.dtype, device=qkv.device)
    _delta_step[(rows, v_heads)](
        mixed, z, b, a, delta, slots, log_a, dt_bias, norm, out, z.stride(0), b.stride(0), a.stride(0),
        dk**-0.5, 1e-6, norm_eps, k_heads, v_heads, dk, dv, num_warps=8,
    )  # fmt: skip
    return out
