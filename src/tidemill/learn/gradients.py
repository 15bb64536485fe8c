"""The gradients of one update: added up over micro-batches and ranks, divided, clipped. On one device nothing here
waits for it but the final norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from tidemill.device.vendor import widest
from tidemill.learn.parallel.collectives import MeshLink
from tidemill.learn.parallel.cuts import Cut, copies, local
from tidemill.learn.parallel.mesh import Meshes

PARTS = ("tp", "kv", "ends")  # dimensions along which ranks may hold parts of a gradient that FSDP does not add up


class Gradients:
    """Sums live in `p.grad`, or, when `wide`, in float32 beside 16-bit weights: each micro-batch's gradient is added
    there as soon as it is complete and its own memory given back. Of a weight in pieces they are of this rank's."""

    def __init__(
        self,
        named: Mapping[str, Parameter],
        cuts: Mapping[str, Cut],
        meshes: Meshes,
        links: Mapping[str, MeshLink],
        wide: bool,
    ) -> None:
        self.named = {name: p for name, p in named.items() if p.requires_grad}
        self.parameters = list(self.named.values())
        self.cuts, self.wide = cuts, wide
        self._sums: dict[Parameter, Tensor] = {}
        self._norms: tuple[list[Parameter], list[Tensor]] = ([], [])  # of the last update, for who asks what was wrong
        self._hooks: list[Any] = []
        if wide:
            self._hooks = [p.register_post_accumulate_grad_hook(self._add) for p in self.parameters]  # type: ignore[no-untyped-call]
        self.join(meshes, links)

    def join(self, meshes: Meshes, links: Mapping[str, MeshLink]) -> None:
        """The ranks to add up with."""
        self.links = links
        self.copies = [copies(self.cuts[name], meshes) for name in self.named]
        # Copies of a whole model; where weights lie in pieces, FSDP adds up over all ranks with other samples.
        self.replicas = links["dp"] if meshes.replicate is not None and meshes.data is None else None

    def _add(self, p: Tensor) -> None:
        assert isinstance(p, Parameter) and p.grad is not None
        grad = local(p.grad)
        if p in self._sums:
            self._sums[p].add_(grad)
        else:
            self._sums[p] = grad.float()
        p.grad = None

    def of(self, p: Parameter) -> Tensor | None:
        if self.wide:
            return self._sums.get(p)
        return None if p.grad is None else local(p.grad)

    def ensure(self, p: Parameter) -> Tensor:
        """Its sum so far; zero where this process has added nothing."""
        found = self.of(p)
        return self._zeros(p) if found is None else found

    def _zeros(self, p: Parameter) -> Tensor:
        if self.wide:
            return self._sums.setdefault(p, torch.zeros_like(local(p.detach()), dtype=torch.float32))
        p.grad = torch.zeros_like(p)
        return local(p.grad)

    def finish(self) -> None:
        """Add up what ranks hold in parts. Called once per update, by all ranks, before the norm."""
        if self.replicas is not None:
            self._sum_replicas(self.replicas)
        if all(self.of(p) is None for p in self.parameters):
            for p in self.parameters:  # an update without a gradient is still an update: zeros let the moments decay
                self._zeros(p)
        for kind in PARTS:
            if kind not in self.links:
                continue
            grads = [self.of(p) for name, p in self.named.items() if self.cuts[name].adds == kind]
            parts = [g for g in grads if g is not None]
            if parts:
                flat = torch.cat([g.reshape(-1) for g in parts])
                self.links[kind].all_reduce(flat)
                for g, new in zip(parts, torch.split(flat, [g.numel() for g in parts])):
                    g.copy_(new.view_as(g))

    def _sum_replicas(self, over: MeshLink) -> None:
        """A rank without samples of a parameter adds zero, if another has some."""
        given = torch.tensor([self.of(p) is not None for p in self.parameters], dtype=torch.int32)
        given = over.all_reduce(given, dist.ReduceOp.MAX)
        for p, is_given in zip(self.parameters, given.tolist()):
            if is_given:
                over.all_reduce(self.ensure(p))

    def divide_and_clip(self, divisor: float, largest_norm: float | None) -> float:
        """The norm of the whole model's gradient after dividing and before clipping, the same on every rank."""
        learned = [p for p in self.parameters if self.of(p) is not None]
        grads = [self.ensure(p) for p in learned]
        if grads:
            torch._foreach_div_(grads, divisor)
        norms = list(torch._foreach_norm(grads, 2.0, dtype=torch.float32)) if grads else []
        self._norms = learned, norms
        norm = self._alone(norms) if self.links["world"].size == 1 else self._over_ranks(norms, learned)
        if largest_norm is not None and math.isfinite(largest_norm) and grads:
            share = (largest_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(grads, share.to(grads[0].device, torch.float32))
        return float(norm)

    @staticmethod
    def _alone(norms: list[Tensor]) -> Tensor:
        found: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return found

    def _over_ranks(self, norms: list[Tensor], learned: list[Parameter]) -> Tensor:
        """Elements that several ranks hold are counted once in all."""
        held = dict(zip(self.parameters, self.copies))
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        wide = widest(device)
        squares = [n.to(wide) ** 2 / held[p] for p, n in zip(learned, norms)]
        square = torch.stack(squares).sum() if squares else torch.zeros((), dtype=wide, device=device)
        return self.links["world"].all_reduce(square).sqrt()

    def not_finite(self) -> list[str]:
        """Whose gradient was not, before clipping spread it to all; over all ranks."""
        learned, norms = self._norms
        names = {p: name for name, p in self.named.items()}
        is_well = torch.isfinite(torch.stack(norms)).tolist() if norms else []
        own = [names[p] for p, well in zip(learned, is_well, strict=True) if not well]
        return sorted({name for part in self.links["world"].gather_plain(own) for name in part})

    def clear(self) -> None:
        self._sums.clear()
        for p in self.parameters:
            p.grad = None

    def close(self) -> None:
        """Let the parameters go: another learner may have them."""
        self.clear()
        for hook in self._hooks:
            hook.remove()
