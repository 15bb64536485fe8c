"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): y = x Wᵀ + (α / r) · x Aᵀ Bᵀ, with W frozen.

B starts at 0, so a fresh adapter changes nothing; the reference policy is the model with its adapters off. Parameters
keep their names, so a checkpoint or an exported folder holds merged weights and opens like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tidemill.errors import ModelError


class LoraLinear(nn.Linear):
    """A linear layer that was given an adapter in place."""

    lora_a: nn.Parameter  # (rank, in)
    lora_b: nn.Parameter  # (out, rank)
    factor: float
    is_on: bool

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        if not self.is_on:
            return out
        return out + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.factor

    def merged(self) -> Tensor:
        change = (self.lora_b.float() @ self.lora_a.float()) * self.factor
        return (self.weight.float() + change).to(self.weight.dtype)


def attach(model: Any, rank: int, alpha: float, seed: int = 0) -> None:
    """Adapters on every matrix of the decoder's layers; everything else is frozen."""
    model.requires_grad_(False)
    layers = model.get_decoder().layers
    linears = [m for m in layers.modules() if type(m) is nn.Linear]
    if not linears:
        raise ModelError("the decoder's layers have no linear modules to adapt", "set learn.lora_rank=0")
    draw = torch.Generator().manual_seed(seed)
    for linear in linears:
        weight = linear.weight
        a = torch.empty(rank, linear.in_features).uniform_(-1, 1, generator=draw) * linear.in_features**-0.5
        linear.__class__ = LoraLinear
        adapted: Any = linear
        adapted.lora_a = nn.Parameter(a.to(weight))
        adapted.lora_b = nn.Parameter(weight.new_zeros(linear.out_features, rank))
        adapted.factor, adapted.is_on = alpha / rank, True


def is_attached(model: Any) -> bool:
    return any(isinstance(m, LoraLinear) for m in model.modules())


def adapters(model: Any) -> dict[str, Tensor]:
    """The adapters' own tensors; empty without any."""
    return {n: p.detach() for n, p in model.named_parameters() if n.endswith((".lora_a", ".lora_b"))}


def merged(model: Any) -> dict[str, Tensor]:
    """Every parameter under its usual name, with its adapter's change in it."""
    own = adapters(model)
    found = {n: p.detach() for n, p in model.named_parameters() if n not in own}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            found[f"{name}.weight"] = module.merged().detach()
    return found


class Reference:
    """The same model with its adapters off: the policy that learning started from, at no cost of memory."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


@contextmanager
def without(model: Any) -> Iterator[None]:
    """Adapters off while a reference is asked; nothing for any other model."""
    switched = [m for m in model.modules() if isinstance(m, LoraLinear)] if isinstance(model, Reference) else []
    for m in switched:
        m.is_on = False
    try:
        yield
    finally:
        for m in switched:
            m.is_on = True
