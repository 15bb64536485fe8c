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

from tidemill.models.lora import LoraLinear

Scaling = Literal["tensorwise", "rowwise"]
FINE, WIDE = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # what the hardware's product asks of every side
LEAST_SCALE = 1e-12  # of a factor that is 0 everywhere


def attach(layers: list[Any], scaling: Scaling) -> int:
    """Every linear module of these layers whose sides allow it; how many. Its class stays: rollout reads it as ever.

    Of a module with an adapter the frozen weight's products are 8-bit; the adapter's own are small and stay."""
    chosen = [m for layer in layers for m in layer.modules() if isinstance(m, nn.Linear) and _fits(m)]
    for linear in chosen:
        if isinstance(linear, LoraLinear):
            linear.multiply = FORMS[scaling]  # type: ignore[assignment]
        else:  # bound to its module, so that a copy of the model has a form of its own
            linear.forward = MethodType(FORWARDS[scaling], linear)  # type: ignore[method-assign]
    return len(chosen)


def _fits(linear: nn.Linear) -> bool:
    is_known = type(linear) in (nn.Linear, LoraLinear)
    return is_known and not (linear.in_features % MULTIPLE or linear.out_features % MULTIPLE)


def detach(layers: list[Any]) -> None:
    for layer in layers:
        for m in layer.modules():
            if isinstance(m, nn.Linear):
                m.__dict__.pop("forward", None)
                m.__dict__.pop("multiply", None)


def _tensorwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return fp8_linear(x, weight, bias, "tensorwise")


def _rowwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return fp8_linear(x, weight, bias, "rowwise")


def _forward_tensorwise(linear: nn.Linear, x: Tensor) -> Tensor:
    return _tensorwise(x, linear.weight, linear.bias)


def _forward_rowwise(linear: nn.Linear, x: Tensor) -> Tensor:
    return _rowwise(x, linear.weight, linear.bias)


FORMS = {"tensorwise": _tensorwise, "rowwise": _rowwise}
FORWARDS = {"tensorwise": _forward_tensorwise, "rowwise": _forward_rowwise}


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, scaling: Scaling) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    rounded = (quantized(factor.detach(), FINE, scaling) for factor in (flat, weight))
    out: Tensor = _linear(flat, weight, *(part for pair in rounded for part in pair))
    out = out.reshape(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


# The products are operators of their own, which compiled layers call without looking inside (torch 2.11's compiler
# fails on a torch.autograd.Function in a method bound to one module). Rounding is plain torch code outside of them, so
# that a compiler makes one pass of it, together with whatever made the factor.


@torch.library.custom_op(
    "tidemill::fp8_product",
    mutates_args=(),
    schema="(Tensor a8, Tensor a_scale, Tensor b8, Tensor b_scale, ScalarType dtype, bool is_forward) -> Tensor",
)
def _product(a8: Tensor, a_scale: Tensor, b8: Tensor, b_scale: Tensor, dtype: torch.dtype, is_forward: bool) -> Tensor:
    if a8.device.type == "cpu":  # torch 2.11 has no scale per row here, and nobody has a faster product
        return ((a8.float() @ b8.float().t()) * a_scale * (b_scale.t() if b_scale.ndim else b_scale)).to(dtype)
    lacking = -a8.shape[1] % MULTIPLE
    if lacking:  # tokens are summed over in a weight's gradient, and there may be any number of them
        a8, b8 = (F.pad(x.view(torch.uint8), (0, lacking)).view(x.dtype) for x in (a8, b8))
    # With a scale per row the product comes in bfloat16 only; the sums inside are float32 either way.
    return torch._scaled_mm(
        a8, b8.t(), scale_a=a_scale, scale_b=b_scale.t() if b_scale.ndim else b_scale,
        out_dtype=torch.bfloat16 if a_scale.ndim else dtype, use_fast_accum=is_forward,
    ).to(dtype)  # fmt: skip


@_product.register_fake
def _(a8: Tensor, a_scale: Tensor, b8: Tensor, b_scale: Tensor, dtype: torch.dtype, is_forward: bool) -> Tensor:
    return a8.new_empty(a8.shape[0], b8.shape[0], dtype=dtype)


@torch.library.custom_op(
    "tidemill::fp8_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor x8, Tensor x_scale, Tensor weight8, Tensor weight_scale) -> Tensor",
)
def _linear(x: Tensor, weight: Tensor, x8: Tensor, x_scale: Tensor, weight8: Tensor, weight_scale: Tensor) -> Tensor:
    """x and weight are here for their gradients alone."""
    made: Tensor = _product(x8, x_scale, weight8, weight_scale, x.dtype, True)
    return made


@_linear.register_fake
def _(x: Tensor, weight: Tensor, x8: Tensor, x_scale: Tensor, weight8: Tensor, weight_scale: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    x, weight, _, x_scale, _, weight_scale = inputs
    ctx.save_for_backward(x, weight, x_scale, weight_scale)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, x_scale, weight_scale = ctx.saved_tensors
    wants_x, wants_weight = ctx.needs_input_grad[:2]
    # One scale for a whole tensor is that of its transpose as well; a row's is not a column's.
    is_rowwise = x_scale.ndim > 0
    kind = FINE if is_rowwise else WIDE
    whole = None if is_rowwise else scale_of(grad, kind, "tensorwise")
    if is_rowwise:
        x_scale = weight_scale = None

    def with_scale(factor: Tensor, kind: torch.dtype, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        scale = scale_of(factor, kind, "rowwise") if scale is None else scale
        return rounded(factor, kind, scale), scale

    def times(a: Tensor, b: Tensor, b_scale: Tensor | None) -> Tensor:
        made: Tensor = _product(*with_scale(a, kind, whole), *with_scale(b, FINE, b_scale), grad.dtype, False)
        return made

    return (
        times(grad, weight.t(), weight_scale) if wants_x else None,
        times(grad.t(), x.t(), x_scale) if wants_weight else None,
        None, None, None, None,
    )  # fmt: skip


_linear.register_autograd(_backward, setup_context=_keep)


def product(a: Tensor, b: Tensor, scaling: Scaling, is_forward: bool = False) -> Tensor:
    """a (m, k) · b (n, k)ᵀ, both rounded to 8 bits, summed in float32, in a's dtype."""
    kind = WIDE if scaling == "tensorwise" and not is_forward else FINE
    made: Tensor = _product(*quantized(a, kind, scaling), *quantized(b, FINE, scaling), a.dtype, is_forward)
    return made


def quantized(x: Tensor, kind: torch.dtype, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """x / scale in 8 bits, row-major, and the float32 scale: (), or (rows, 1)."""
    scale = scale_of(x, kind, scaling)
    return rounded(x, kind, scale), scale


def scale_of(x: Tensor, kind: torch.dtype, scaling: Scaling) -> Tensor:
    largest = x.abs().amax(1, keepdim=True) if scaling == "rowwise" else x.abs().amax()
    return (largest.float() / torch.finfo(kind).max).clamp(min=LEAST_SCALE)


def rounded(x: Tensor, kind: torch.dtype, scale: Tensor) -> Tensor:
    return (x.float() / scale).to(kind).contiguous()
