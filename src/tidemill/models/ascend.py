"""Grouped products by Ascend's fused operator, forward and backward, without asking the host where groups end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tidemill.device import vendor

BY_ROWS, BY_SUM = 0, 2  # what is grouped: the rows of the product, or what is summed over
ENDS, COUNTS = 0, 1  # what a list of groups says of each
ONE_TENSOR = 3


def has_grouped(x: Tensor) -> bool:
    return vendor.implements(x.device.type, f"{x.device.type}::npu_grouped_matmul")


def product(rows: Tensor, stack: Tensor, groups: Tensor, says: int = ENDS) -> Tensor:
    """Rows (rows, in), sorted into groups, each through its own matrix of a stack (groups, in, out). `groups` (int64)
    has where each ends, or how many each has."""
    return _call(rows, stack, groups, says, BY_ROWS)


def grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows x (rows, in), sorted into groups that end at `ends`, each through its own weight (groups, out, in)."""
    out: Tensor = _Grouped.apply(x, weights, ends.long())  # type: ignore[no-untyped-call]
    return out


def _call(a: Tensor, b: Tensor, groups: Tensor, says: int, what: int) -> Tensor:
    made: Tensor = vendor.operators(a.device).npu_grouped_matmul(
        [a], [b], group_list=groups, group_list_type=says, group_type=what, split_item=ONE_TENSOR
    )[0]
    return made


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights, ends)
        return product(x.contiguous(), weights.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weights, ends = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = product(grad, weights, ends) if ctx.needs_input_grad[0] else None
        grad_weights = None
        if ctx.needs_input_grad[1]:
            grad_weights = _call(grad.t(), x.contiguous(), ends, ENDS, BY_SUM)
        return grad_x, grad_weights, None
