"""AdamW's update of one tensor as one Triton kernel: state is read, worked on and written once, in the form it is kept.

`tidemill.learn.optim.adam` holds the plain form that this must equal: moments of float32 or of 8 bits, with or without
a float32 copy of the weights. Stochastic rounding draws its own numbers.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Arguments of a kernel are pointers and constants of Triton's own language, which has no types to name.
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tidemill.learn.optim.adam import CODE_BLOCK, MOMENTS, ROUNDING, SCALE

BLOCKS, WARPS = 4, 4  # of a program


@triton.jit
def _decoded(code, scale, IS_SECOND: tl.constexpr):
    x = code.to(tl.float32)
    if IS_SECOND:
        x = x / 255
        return x * x * x * x * scale
    x = x / 127
    return x * tl.abs(x) * scale


@triton.jit
def _store(x, codes, scales, at, row, inside, margin, TINY: tl.constexpr, IS_SECOND: tl.constexpr):
    """`adam._encode` of whole blocks."""
    scale = tl.max(tl.abs(x), 1)
    share = x / tl.maximum(scale, TINY)[:, None]
    root = tl.sqrt(tl.abs(share))
    if IS_SECOND:
        code = tl.ceil(tl.sqrt(root) * 255 - margin)
        code = tl.maximum(code, tl.where(share > 0, 1.0, 0.0))  # no value but 0 becomes 0
    else:
        code = tl.floor(root * 127 + 0.5)
        code = tl.where(share < 0, -code, code)
    tl.store(codes + at, code.to(codes.dtype.element_ty), mask=inside[:, None])
    tl.store(scales + row, scale, mask=inside)


@triton.jit(do_not_specialize=["seed"])
def _adam(
    weight, gradient, first, second, first_scale, second_scale, master, count, seed,
    decay, forget, remember, fresh, correction, size, eps, margin, TINY: tl.constexpr,
    CODED: tl.constexpr, HAS_MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < count
    in_blocks = row * BLOCK < count  # coded moments have whole blocks
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    if CODED:
        m_scale = tl.load(first_scale + row, mask=in_blocks, other=0.0)[:, None]
        v_scale = tl.load(second_scale + row, mask=in_blocks, other=0.0)[:, None]
        m = _decoded(tl.load(first + at, mask=in_blocks[:, None], other=0), m_scale, False)
        v = _decoded(tl.load(second + at, mask=in_blocks[:, None], other=0), v_scale, True)
    else:
        m = tl.load(first + at, mask=inside, other=0.0)
        v = tl.load(second + at, mask=inside, other=0.0)
    source = master if HAS_MASTER else weight
    w = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    m = m + forget * (g - m)
    v = v * remember + fresh * g * g
    w = w * decay - size * m / (tl.sqrt(v / correction) + eps)
    if CODED:
        _store(m, first, first_scale, at, row, in_blocks, margin, TINY, False)
        _store(v, second, second_scale, at, row, in_blocks, margin, TINY, True)
    else:
        tl.store(first + at, m, mask=inside)
        tl.store(second + at, v, mask=inside)
    if HAS_MASTER:
        tl.store(master + at, w, mask=inside)
    if STOCHASTIC:
        noise = tl.randint(seed, at) & 0xFFFF
        w = ((w.to(tl.int32, bitcast=True) + noise.to(tl.int32)) & -65536).to(tl.float32, bitcast=True)
    tl.store(weight + at, w.to(weight.dtype.element_ty), mask=inside)


def step_(
    p: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int, group: dict[str, Any], seed: int | None
) -> None:
    """`p` and `state` in place. `seed`: round `p`, of bfloat16, stochastically."""
    (b1, b2), lr = group["betas"], group["lr"]
    first, second = (state[name] for name in MOMENTS)
    is_coded = f"{MOMENTS[0]}{SCALE}" in state
    scales = (state[f"{name}{SCALE}"] for name in MOMENTS) if is_coded else (first, second)
    _adam[(triton.cdiv(p.numel(), CODE_BLOCK * BLOCKS),)](
        p, gradient, first, second, *scales, state.get("master", p), p.numel(), (seed or 0) & 0x7FFFFFFF,
        1 - lr * group["weight_decay"], 1 - b1, b2, 1 - b2, 1 - b2**step, lr / (1 - b1**step), group["eps"], ROUNDING,
        torch.finfo(torch.float32).tiny, is_coded, "master" in state, seed is not None, CODE_BLOCK, BLOCKS,
        num_warps=WARPS,
    )  # fmt: skip
