"""Experts of a mixture as grouped products: tokens sorted by expert, one product for each or one call for all.

Plugged into transformers through its ExpertsInterface, so every mixture whose experts are stacked and gated runs it;
the loop that transformers calls `eager` is the plain form it must equal.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ExpertsInterface

from tidemill.models import ascend

NAME = "tidemill"
STACKS = ("gate_up_proj", "down_proj")
ALIGNED = 16  # bytes: rows of the fused call's operands begin at multiples of this


def plug(model: Any) -> None:
    """Let the model's experts run here, where they are of the form that is known here."""
    if any(is_gated(m) for m in model.modules()):
        model.set_experts_implementation(NAME)


def is_gated(module: Any) -> bool:
    """Stacked, gated experts, with or without bias, rows or columns first; the module's own `_apply_gate` knows how
    gate and up lie in the first stack, and what becomes of them."""
    stacks = all(hasattr(module, name) for name in STACKS)
    return stacks and getattr(module, "has_gate", None) is True and hasattr(module, "_apply_gate")


def is_known(module: Any) -> bool:
    """Stacked, gated experts without bias, rows first: (experts, 2 · inner, width) and (experts, width, inner)."""
    form = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    return all(getattr(module, name, None) is value for name, value in form.items())


def forward(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """hidden (tokens, width), index and weights (tokens, k): chosen experts and their shares → (tokens, width)."""
    tokens, k = index.shape
    chosen = index.reshape(-1)
    order = torch.argsort(chosen, stable=True)
    made = gated(module, hidden.index_select(0, order // k), ends_of(chosen, _count(module)))
    made = made * weights.reshape(-1).index_select(0, order).unsqueeze(-1)
    back = torch.empty_like(made).index_copy(0, order, made)  # token after token, so that sums have one order
    return back.view(tokens, k, -1).sum(1).to(hidden.dtype)


def _count(module: Any) -> int:
    stack = module.gate_up_proj if hasattr(module, "gate_up_proj") else module.gate_up_proj_code
    return int(stack.shape[0])


def gated(module: Any, x: Tensor, ends: Tensor) -> Tensor:
    """(rows sorted by expert, width) through each row's expert."""
    return linear(module, "down_proj", module._apply_gate(linear(module, "gate_up_proj", x, ends)), ends)


def linear(module: Any, stack: str, x: Tensor, ends: Tensor) -> Tensor:
    """Multiply each row by its expert of a stack: the weight, in 8 bits if `models.layers.narrow` made it so, and the
    adapter's change if `models.lora` gave it one."""
    code = getattr(module, f"{stack}_code", None)
    if code is not None:
        return _narrow(x, code, getattr(module, f"{stack}_scale"), ends)
    weight, bias = getattr(module, stack), getattr(module, f"{stack}_bias", None)
    out = grouped(x, weight.transpose(-2, -1) if getattr(module, "is_transposed", False) else weight, ends)
    if bias is not None:
        counts = ends.diff(prepend=ends.new_zeros(1))
        out = out + bias.repeat_interleave(counts, 0, output_size=len(x))
    pair = adapter(module, stack)
    if pair is None:
        return out
    change: Tensor = grouped(grouped(x, pair[0], ends), pair[1], ends) * module.lora_factor
    return out + change


def linear_of(module: Any, stack: str, expert: int, x: Tensor) -> Tensor:
    """The same of one expert, whose rows `x` are."""
    out, pair = F.linear(x, getattr(module, stack)[expert]), adapter(module, stack)
    if pair is None:
        return out
    change: Tensor = F.linear(F.linear(x, pair[0][expert]), pair[1][expert]) * module.lora_factor
    return out + change


def adapter(module: Any, stack: str) -> tuple[Tensor, Tensor] | None:
    """A (experts, rank, in) and B (experts, out, rank) while they are on."""
    if not getattr(module, "lora_on", False):
        return None
    return getattr(module, f"{stack}_lora_a"), getattr(module, f"{stack}_lora_b")


def _narrow(x: Tensor, code: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    """One expert's weight is made wide at a time."""
    out = x.new_empty((x.shape[0], code.shape[1]))
    for group, rows in _groups(ends.tolist()):
        out[rows] = F.linear(x[rows], code[group].to(x.dtype)) * scale[group].to(x.dtype)
    return out


def ends_of(chosen: Tensor, experts: int) -> Tensor:
    """(experts,) int32: where each expert's rows end once rows are sorted by expert."""
    counts = torch.zeros(experts, dtype=torch.int32, device=chosen.device)
    counts.index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32))  # bincount would wait for the device
    return counts.cumsum(0, dtype=torch.int32)


def grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows x (rows, in), sorted into groups that end at `ends`, each through its own weight (groups, out, in)."""
    if ascend.has_grouped(x):
        return ascend.grouped(x, weights, ends)
    if _fused(x, weights):
        out: Tensor = _grouped_mm()(x, weights.transpose(-2, -1), offs=ends)
        return out
    looped: Tensor = _Looped.apply(x, weights, ends.tolist())  # type: ignore[no-untyped-call]
    return looped


@functools.cache
def _grouped_mm() -> Any:
    return getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def _fused(x: Tensor, weights: Tensor) -> bool:
    if x.device.type == "cpu" or x.dtype != torch.bfloat16 or weights.dtype != torch.bfloat16:
        return False
    size = x.element_size()
    return _grouped_mm() is not None and all(n * size % ALIGNED == 0 for n in weights.shape[1:])


class _Looped(torch.autograd.Function):
    """One product per group. Its gradient of the weights is one tensor, where slicing would make one per group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, ends: list[int]) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.ends = ends
        out = x.new_empty((x.shape[0], weights.shape[1]))
        for group, rows in _groups(ends):
            out[rows] = F.linear(x[rows], weights[group])  # which the batch-invariant mode replaces
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weights = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_weights = torch.zeros_like(weights) if ctx.needs_input_grad[1] else None
        for group, rows in _groups(ctx.ends):
            if grad_x is not None:
                torch.mm(grad[rows], weights[group], out=grad_x[rows])
            if grad_weights is not None:
                torch.mm(grad[rows].t(), x[rows], out=grad_weights[group])
        return grad_x, grad_weights, None


def _groups(ends: list[int]) -> list[tuple[int, slice]]:
    starts = [0, *ends[:-1]]
    return [(g, slice(a, b)) for g, (a, b) in enumerate(zip(starts, ends)) if b > a]


ExpertsInterface.register(NAME, forward)
