"""The gradients of one update: added up over micro-batches, divided, clipped. Nothing here waits for the device but
the final norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


class Gradients:
    """Sums live in `p.grad`, or, when `wide`, in float32 beside 16-bit weights: each micro-batch's gradient is added
    there as soon as it is complete and its own memory given back."""

    def __init__(self, parameters: Iterable[Parameter], wide: bool) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.wide = wide
        self._sums: dict[Parameter, Tensor] = {}
        self._norms: tuple[list[Parameter], list[Tensor]] = ([], [])  # of the last update, for who asks what was wrong
        self._hooks: list[Any] = []
        if wide:
            self._hooks = [p.register_post_accumulate_grad_hook(self._add) for p in self.parameters]  # type: ignore[no-untyped-call]

    def _add(self, p: Tensor) -> None:
        assert isinstance(p, Parameter) and p.grad is not None
        if p in self._sums:
            self._sums[p].add_(p.grad)
        else:
            self._sums[p] = p.grad.float()
        p.grad = None

    def of(self, p: Parameter) -> Tensor | None:
        return self._sums.get(p) if self.wide else p.grad

    def ensure(self, p: Parameter) -> Tensor:
        """Its sum so far; zero where this process has added nothing."""
        found = self.of(p)
        return self._zeros(p) if found is None else found

    def _zeros(self, p: Parameter) -> Tensor:
        if self.wide:
            return self._sums.setdefault(p, torch.zeros_like(p, dtype=torch.float32))
        p.grad = torch.zeros_like(p)
        return p.grad

    def divide_and_clip(self, divisor: float, largest_norm: float | None) -> Tensor:
        """The norm after dividing and before clipping, still on the device."""
        learned = [p for p in self.parameters if self.of(p) is not None]
        if not learned:  # an update without a gradient is still an update: its zeros let the moments decay
            learned = self.parameters
        grads = [self.ensure(p) for p in learned]
        torch._foreach_div_(grads, divisor)
        norms = list(torch._foreach_norm(grads, 2.0, dtype=torch.float32))
        self._norms = learned, norms
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        if largest_norm is not None and math.isfinite(largest_norm):
            torch._foreach_mul_(grads, (largest_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def not_finite(self) -> list[Parameter]:
        """Whose gradient was not, before clipping spread it to all."""
        learned, norms = self._norms
        is_well = torch.isfinite(torch.stack(norms)).tolist() if norms else []
        return [p for p, well in zip(learned, is_well, strict=True) if not well]

    def clear(self) -> None:
        self._sums.clear()
        for p in self.parameters:
            p.grad = None

    def close(self) -> None:
        """Let the parameters go: another learner may have them."""
        self.clear()
        for hook in self._hooks:
            hook.remove()
