"""The gradients of one update over ranks: summed where ranks hold parts, with one norm, clipped and skipped alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tidemill.learn.parallel.collectives import MeshLink
from tidemill.learn.parallel.cuts import Cut, copies, local
from tidemill.learn.parallel.mesh import Meshes


class ShardedGradients:
    """As `learn.gradients.Gradients`, of this rank's pieces. `finish` is called once per update, before the norm."""

    def __init__(
        self,
        named: Mapping[str, Parameter],
        cuts: Mapping[str, Cut],
        meshes: Meshes,
        links: Mapping[str, MeshLink],
        wide: bool,
    ) -> None:
        self.named = {name: p for name, p in named.items() if p.requires_grad}
        self.cuts, self.links, self.wide = cuts, links, wide
        self.copies = {name: copies(cuts[name], meshes) for name in self.named}
        self._sums: dict[str, Tensor] = {}
        self._hooks: list[Any] = []
        if wide:
            self._hooks = [
                p.register_post_accumulate_grad_hook(lambda q, name=name: self._add(name, q))  # type: ignore[no-untyped-call]
                for name, p in self.named.items()
            ]

    def _add(self, name: str, p: Parameter) -> None:
        assert p.grad is not None
        grad = local(p.grad)
        if name in self._sums:
            self._sums[name].add_(grad)
        else:
            self._sums[name] = grad.float()
        p.grad = None

    def of(self, name: str) -> Tensor | None:
        if self.wide:
            return self._sums.get(name)
        grad = self.named[name].grad
        return None if grad is None else local(grad)

    def finish(self) -> None:
        """Add up what ranks of a dimension hold in parts, in one exchange per dimension."""
        if all(self.of(name) is None for name in self.named):  # on every rank: nothing that was accumulated teaches
            self._fill_with_zeros()
        for kind in ("tp", "kv", "ends"):
            if kind not in self.links:
                continue
            grads = [self.of(name) for name in self.named if self.cuts[name].adds == kind]
            parts = [g for g in grads if g is not None]
            if parts:
                flat = torch.cat([g.reshape(-1) for g in parts])
                self.links[kind].all_reduce(flat)
                for g, new in zip(parts, torch.split(flat, [g.numel() for g in parts])):
                    g.copy_(new.view_as(g))

    def _fill_with_zeros(self) -> None:
        """An update without a gradient is still an update: its zeros let the moments decay."""
        for name, p in self.named.items():
            if self.wide:
                self._sums[name] = torch.zeros_like(local(p.detach()), dtype=torch.float32)
            else:
                p.grad = torch.zeros_like(p)

    def divide_and_clip(self, divisor: float, largest_norm: float | None) -> float:
        """The norm of the whole model's gradient after dividing and before clipping, the same on every rank."""
        found = {name: g for name in self.named if (g := self.of(name)) is not None}
        grads = list(found.values())
        if grads:
            torch._foreach_div_(grads, divisor)
        norms = torch._foreach_norm(grads, 2.0, dtype=torch.float32) if grads else []
        # Elements that several ranks hold are counted once in all.
        squares = [n.double() ** 2 / self.copies[name] for name, n in zip(found, norms)]
        device = grads[0].device if grads else torch.device("cpu")
        square = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
        norm = math.sqrt(v) if math.isfinite(v := float(self.links["world"].all_reduce(square))) else math.inf
        if largest_norm is not None and math.isfinite(norm) and grads:
            torch._foreach_mul_(grads, min(1.0, largest_norm / (norm + 1e-6)))
        return norm

    def clear(self) -> None:
        self._sums.clear()
        for p in self.named.values():
            p.grad = None

    def close(self) -> None:
        self.clear()
        for hook in self._hooks:
            hook.remove()
