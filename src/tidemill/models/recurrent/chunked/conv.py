"""A causal convolution of each channel by itself over a packed row: every tap of a token looks at a row of its own
sequence, or at nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from tidemill.models.recurrent.chunked.on_device import kernels
from tidemill.models.recurrent.chunked.plan import Taps


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, taps: Taps) -> Tensor:
    """x (rows, channels), weight (channels, width) → (tokens, channels)."""
    out: Tensor = _conv(x, weight, taps.source, taps.target, *taps.crossing)
    return out if bias is None else out + bias


@torch.library.custom_op("tidemill::row_conv", mutates_args=())
def _conv(
    x: Tensor, weight: Tensor, source: Tensor, target: Tensor, rows: Tensor, tokens: Tensor, which: Tensor
) -> Tensor:
    if (fast := kernels(x.device.type)) is not None:
        return fast.conv(x, weight, source)  # type: ignore[no-any-return]
    seen = _rows(x, source)  # (tokens, width, channels)
    return torch.einsum("twc,cw->tc", seen, weight.to(seen.dtype)).to(x.dtype)


@_conv.register_fake
def _(x: Tensor, weight: Tensor, source: Tensor, *_: Tensor) -> Tensor:
    return x.new_empty(source.shape[0], x.shape[1])


@torch.library.custom_op("tidemill::row_conv_backward", mutates_args=())
def _conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, source: Tensor, target: Tensor, rows: Tensor, tokens: Tensor, which: Tensor
) -> tuple[Tensor, Tensor]:
    if (fast := kernels(x.device.type)) is not None:
        grad_x, grad_weight = fast.conv_backward(grad, x, weight, source, target)
    else:
        grad_x = torch.einsum("rwc,cw->rc", _rows(grad, target), weight.to(grad.dtype).float())
        grad_weight = torch.einsum("tc,twc->cw", grad.float(), _rows(x, source))
    # What a prompt's last tokens are to the responses behind them, and states to what is read behind them.
    across = grad.index_select(0, tokens).float() * weight.float().t().index_select(0, which)
    grad_x = grad_x.float().index_add(0, rows, across)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


@_conv_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _setup(ctx: object, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)  # type: ignore[attr-defined]


def _backward(ctx: object, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, *rest = ctx.saved_tensors  # type: ignore[attr-defined]
    return *_conv_backward(grad.contiguous(), x, weight, *rest), None, None, None, None, None


_conv.register_autograd(_backward, setup_context=_setup)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """(n, width, channels) in float32; 0 where the index is below 0."""
    found = x.index_select(0, index.clamp(min=0).flatten().long()).float().view(*index.shape, -1)
    return found * (index >= 0).unsqueeze(-1)
