"""Norms, gates, rotary positions and products of a model's layers in few passes, forward and backward, for float32 on a
CPU (`fused.c`); matrix products by the library that is faster on this processor.

A small model spends a fifth of a learning step between its matrix products. A module is replaced only if the fused form
gives what the module gives, tried at once (`fuse`); where there is no compiler, or a tensor is of another kind, modules
do as they always did. The form of whole decoder layers is in `tidemill.models.layers.forms`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tidemill.device.compiled import library, threads_for

SOURCE = Path(__file__).with_name("fused.c")
MANY_ROWS = 512  # fewer make a product too small to gain


class _Placing(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("rows", "cos", "sin", "q_norm", "k_norm", "q", "k", "v", "scales")]
        + [(name, ctypes.c_int64) for name in ("tokens", "heads", "kv_heads", "dim")]
        + [("eps", ctypes.c_float)]
    )


@cache
def code() -> ctypes.CDLL | None:
    found = library(SOURCE)
    if found is not None:
        pointer, number, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        found.tm_norm.argtypes = [pointer] * 4 + [number] * 2 + [ctypes.c_float, threads]
        found.tm_norm_back.argtypes = [pointer] * 7 + [number] * 2 + [threads]
        found.tm_gated.argtypes = [pointer] * 2 + [number] * 2 + [threads]
        found.tm_gated_back.argtypes = [pointer] * 3 + [number] * 2 + [threads]
        found.tm_place.argtypes = [ctypes.POINTER(_Placing), threads]
        found.tm_place_back.argtypes = [ctypes.POINTER(_Placing), pointer, pointer, threads]
    return found


def _code() -> ctypes.CDLL:
    found = code()
    assert found is not None, "fused forms are used only where `fuse` found a compiler"
    return found


class Norm(torch.autograd.Function):
    """x / rms(x) * weight over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _normed(ctx, x.contiguous(), weight, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        return *_norm_back(ctx, dy, None), None


class Fork(torch.autograd.Function):
    """x itself and its norm: what goes past the norm and what goes through it meet again in one pass backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return x, _normed(ctx, x, weight, eps)

    @staticmethod
    def backward(ctx: Any, past: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        return *_norm_back(ctx, dy, past.contiguous()), None


def _normed(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    dim = x.shape[-1]
    y, scales = torch.empty_like(x), torch.empty(x.numel() // dim)
    pointers = [t.data_ptr() for t in (x, weight, y, scales)]
    _code().tm_norm(*pointers, len(scales), dim, eps, threads_for(x.numel()))
    ctx.save_for_backward(x, weight, scales)
    return y


def _norm_back(ctx: Any, dy: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
    x, weight, scales = ctx.saved_tensors
    dy, dx, threads = dy.contiguous(), torch.empty_like(x), threads_for(x.numel())
    dweight = torch.zeros(threads, x.shape[-1])
    pointers = [t.data_ptr() for t in (x, weight, scales, dy)]
    beside = None if past is None else past.data_ptr()
    _code().tm_norm_back(*pointers, beside, dx.data_ptr(), dweight.data_ptr(), len(scales), x.shape[-1], threads)
    return dx, dweight.sum(0)


class Gated(torch.autograd.Function):
    """both (…, 2 dim) = (gate, up) → silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        both = both.contiguous()
        dim = both.shape[-1] // 2
        y, rows = both.new_empty(*both.shape[:-1], dim), both.numel() // (2 * dim)
        _code().tm_gated(both.data_ptr(), y.data_ptr(), rows, dim, threads_for(both.numel()))
        ctx.save_for_backward(both)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        dy, dboth, dim = dy.contiguous(), torch.empty_like(both), both.shape[-1] // 2
        rows = both.numel() // (2 * dim)
        _code().tm_gated_back(*(t.data_ptr() for t in (both, dy, dboth)), rows, dim, threads_for(both.numel()))
        return dboth


class Placed(torch.autograd.Function):
    """rows (tokens, (heads + 2 kv_heads) dim): a token's queries, keys and values → each by itself, (tokens, heads,
    dim), queries and keys normed (where there are norms) and turned to the positions whose cos and sin (tokens, dim)
    are given."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, norms: tuple[Tensor, Tensor] | None, cos: Tensor, sin: Tensor, heads: tuple[int, int],
        eps: float, *learned: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """`learned`: the norms once more, where autograd looks for them."""
        (queries, keys), dim, tokens = heads, cos.shape[-1], len(rows)
        if cos.shape != (tokens, dim) or sin.shape != cos.shape or rows.shape[1] != (queries + 2 * keys) * dim:
            raise RuntimeError(f"positions of {tuple(cos.shape)} and {heads} heads do not fit {tuple(rows.shape)}")
        q, k, v = (rows.new_empty(tokens, count, dim) for count in (queries, keys, keys))
        scales = rows.new_empty(tokens, queries + keys)
        job = _placing(rows, cos, sin, norms, (q, k, v), scales, eps)
        _code().tm_place(ctypes.byref(job), threads_for(rows.numel()))
        ctx.save_for_backward(rows, cos, sin, scales, *learned)
        ctx.eps = eps
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, cos, sin, scales, *learned = ctx.saved_tensors
        norms = (learned[0], learned[1]) if learned else None
        q, k, v = (g.contiguous() for g in gradients)
        threads, out = threads_for(rows.numel()), torch.empty_like(rows)
        dnorms = torch.zeros(threads, 2, cos.shape[-1])
        job = _placing(rows, cos, sin, norms, (q, k, v), scales, ctx.eps)
        _code().tm_place_back(ctypes.byref(job), out.data_ptr(), dnorms.data_ptr(), threads)
        return out, None, None, None, None, None, *(dnorms.sum(0) if norms is not None else ())


def _placing(
    rows: Tensor, cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor] | None, made: tuple[Tensor, Tensor, Tensor],
    scales: Tensor, eps: float,
) -> _Placing:  # fmt: skip
    weights = (None, None) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr())
    pointers = [t.data_ptr() for t in (*made, scales)]
    counts = (len(rows), made[0].shape[1], made[1].shape[1], cos.shape[-1])
    return _Placing(rows.data_ptr(), cos.data_ptr(), sin.data_ptr(), *weights, *pointers, *counts, eps)


class Product(torch.autograd.Function):
    """x (rows, in) times several weights (out, in) at once: (rows, all their outs), and `residual` added, if any.

    Forward and towards x by oneDNN where that is the faster; towards weights MKL is, on every processor tried."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, count: int, *given: Tensor) -> Tensor:
        """`given`: `count` weights, then as many biases or none."""
        weights, biases = given[:count], given[count:]
        ctx.save_for_backward(x, *weights)
        ctx.has_residual, ctx.has_bias = residual is not None, bool(biases)
        return _product(x, _joined(weights), _joined(biases) if biases else None, residual)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wanted, dy, outs = ctx.needs_input_grad, dy.contiguous(), [len(w) for w in weights]
        dx = _product(dy, torch.cat([w.t() for w in weights], 1), None, None) if wanted[0] else None
        dweights: tuple[Tensor | None, ...] = (None,) * len(weights)
        dbiases: tuple[Tensor | None, ...] = (None,) * len(weights) if ctx.has_bias else ()
        if any(wanted[3 : 3 + len(weights)]):
            dweights = torch.split(dy.t() @ x, outs)
        if any(wanted[3 + len(weights) :]):
            dbiases = torch.split(dy.sum(0), outs)
        return dx, dy if ctx.has_residual else None, None, *dweights, *dbiases


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    if not is_mkl_slow() or len(x) < MANY_ROWS:
        made = F.linear(x, weight, bias) if residual is None else torch.addmm(residual, x, weight.t())
        return made if residual is None or bias is None else made.add_(bias)
    how = torch.ops.mkldnn._linear_pointwise
    made = how(x, weight, bias, "none", [], "") if residual is None else how.binary(x, residual, weight, bias, "add")
    return made  # type: ignore[no-any-return]


@cache
def is_mkl_slow() -> bool:
    """MKL takes its fast paths on its maker's processors alone; a fifth is lost on others."""
    try:
        makers = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("vendor_id")]
    except OSError:
        return False
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_both and bool(makers) and "GenuineIntel" not in makers[0]


def is_plain(x: Tensor) -> bool:
    """A whole float32 tensor in host memory: not a piece of one, nor one that is only traced."""
    return type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" and x.dtype == torch.float32


def has_hooks(module: Any) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def norm(module: Any, hidden_states: Tensor, *more: Any, **named: Any) -> Tensor:
    """The fused form of a norm's forward. Some also take a gate, and then do it themselves."""
    if more or named or not (is_plain(hidden_states) and is_plain(module.weight)):
        return type(module).forward(module, hidden_states, *more, **named)  # type: ignore[no-any-return]
    return Norm.apply(hidden_states, module.weight, module.variance_epsilon)  # type: ignore[no-untyped-call, no-any-return]


def linear(module: Any, x: Tensor) -> Tensor:
    """The fused form of a linear layer's forward."""
    is_many = x.numel() >= MANY_ROWS * x.shape[-1]
    if not (is_many and is_plain(x) and is_plain(module.weight)):
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    return product(x.reshape(-1, x.shape[-1]), module).view(*x.shape[:-1], -1)


def product(x: Tensor, *modules: Any, residual: Tensor | None = None) -> Tensor:
    """x (rows, in) through linear layers that are bare: (rows, all their outs)."""
    biases = [m.bias for m in modules if m.bias is not None]
    weights = [m.weight for m in modules]
    made: Tensor = Product.apply(x.contiguous(), residual, len(weights), *weights, *biases)  # type: ignore[no-untyped-call]
    return made


def is_bare(module: Any) -> bool:
    """A linear layer that is nothing but its product, of its own making or of ours."""
    own = vars(module).get("forward")
    is_known = own is None or getattr(own, "__func__", None) is linear
    return type(module) is nn.Linear and is_known and not has_hooks(module) and is_plain(module.weight)


def through(x: Tensor, *modules: Any) -> Tensor:
    """x (rows, in) through several linear layers of any kind: (rows, all their outs)."""
    if all(is_bare(m) for m in modules) and len({m.bias is None for m in modules}) == 1:
        return product(x, *modules)
    return torch.cat([m(x) for m in modules], -1)


def added(residual: Tensor, x: Tensor, module: Any) -> Tensor:
    """residual + module(x)"""
    return product(x, module, residual=residual) if is_bare(module) else residual + module(x)


def gated(module: Any, x: Tensor) -> Tensor:
    """A gated MLP up to its last product: x (rows, in) → (rows, width)."""
    made: Tensor = Gated.apply(through(x, module.gate_proj, module.up_proj))  # type: ignore[no-untyped-call]
    return made


def mlp(module: Any, x: Tensor) -> Tensor:
    """The fused form of a gated MLP's forward."""
    if not (is_plain(x) and is_plain(module.gate_proj.weight)):
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    return module.down_proj(gated(module, x.reshape(-1, x.shape[-1]))).view(x.shape)  # type: ignore[no-any-return]
