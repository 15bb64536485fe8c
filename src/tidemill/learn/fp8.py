"""Linear layers whose three products are 8-bit floating point: weights and sums stay as they are.

y = x Wᵀ, dx = dy W, dW = dyᵀ x. Each factor is divided by a scale that brings its largest value to the format's, and
the product is multiplied by both scales. `tensorwise`: one scale for a factor. `rowwise`: one for each of its rows, the
side that is not summed over, so that an outlier costs precision in its own row alone.

x and W are e4m3 (3 bits of fraction). With one scale dy is e5m2, for its range; with one per row it need not be.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Scaling = Literal["tensorwise", "rowwise"]
FINE, WIDE = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # what the hardware's product asks of every side
LEAST_SCALE = 1e-12  # of a factor that is 0 everywhere


def attach(layers: list[Any], scaling: Scaling) -> int:
    """Every linear module of these layers whose sides allow it; how many. Its class stays: rollout reads it as ever."""
    chosen = [
        m
        for layer in layers
        for m in layer.modules()
        if type(m) is nn.Linear and not (m.in_features % MULTIPLE or m.out_features % MULTIPLE)
    ]
    for linear in chosen:
        # Bound to its module, so that a copy of the model has a form of its own.
        linear.forward = MethodType(FORMS[scaling], linear)  # type: ignore[method-assign]
    return len(chosen)


def detach(layers: list[Any]) -> None:
    for layer in layers:
        for m in layer.modules():
            if type(m) is nn.Linear:
                m.__dict__.pop("forward", None)


def _tensorwise(linear: nn.Linear, x: Tensor) -> Tensor:
    return fp8_linear(x, linear.weight, linear.bias, "tensorwise")


def _rowwise(linear: nn.Linear, x: Tensor) -> Tensor:
    return fp8_linear(x, linear.weight, linear.bias, "rowwise")


FORMS = {"tensorwise": _tensorwise, "rowwise": _rowwise}


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, scaling: Scaling) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    out: Tensor = _linear(F.pad(flat, (0, 0, 0, -rows % MULTIPLE)), weight, scaling)
    out = out[:rows].reshape(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


# Operators of their own, which compiled layers call without looking inside: torch 2.11's compiler fails on a
# torch.autograd.Function in a method bound to one module.


@torch.library.custom_op(
    "tidemill::fp8_product", mutates_args=(), schema="(Tensor a, Tensor b, str scaling, bool is_forward) -> Tensor"
)
def _product(a: Tensor, b: Tensor, scaling: Scaling, is_forward: bool) -> Tensor:
    gradient_format = WIDE if scaling == "tensorwise" and not is_forward else FINE
    a8, a_scale = quantized(a, gradient_format, scaling)
    b8, b_scale = quantized(b, FINE, scaling)
    # Accelerators give rows with scales of their own in bfloat16 only; the sums inside are float32 either way.
    dtype = a.dtype if scaling == "tensorwise" or a.device.type == "cpu" else torch.bfloat16
    return torch._scaled_mm(
        a8, b8.t(), scale_a=a_scale, scale_b=b_scale.t() if b_scale.ndim else b_scale,
        out_dtype=dtype, use_fast_accum=is_forward,
    ).to(a.dtype)  # fmt: skip


@_product.register_fake
def _(a: Tensor, b: Tensor, scaling: Scaling, is_forward: bool) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0])


@torch.library.custom_op(
    "tidemill::fp8_linear", mutates_args=(), schema="(Tensor x, Tensor weight, str scaling) -> Tensor"
)
def _linear(x: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
    return product(x, weight, scaling, is_forward=True)


@_linear.register_fake
def _(x: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Scaling], output: Tensor) -> None:
    x, weight, ctx.scaling = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    wants_x, wants_weight, _ = ctx.needs_input_grad
    return (
        product(grad, weight.t(), ctx.scaling) if wants_x else None,
        product(grad.t(), x.t(), ctx.scaling) if wants_weight else None,
        None,
    )


_linear.register_autograd(_backward, setup_context=_keep)


def product(a: Tensor, b: Tensor, scaling: Scaling, is_forward: bool = False) -> Tensor:
    """a (m, k) · b (n, k)ᵀ, both rounded to 8 bits, summed in float32, in a's dtype."""
    made: Tensor = _product(a, b, scaling, is_forward)
    return made


def quantized(x: Tensor, kind: torch.dtype, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """x / scale in 8 bits, row-major, and the float32 scale: (), or (rows, 1)."""
    largest = x.abs().amax(1, keepdim=True) if scaling == "rowwise" else x.abs().amax()
    scale = (largest.float() / torch.finfo(kind).max).clamp(min=LEAST_SCALE)
    return (x.float() / scale).to(kind).contiguous(), scale
