"""A mixture's experts in the lean forward pass: who goes where, and what the chosen experts make of it.

The plain form here runs anywhere and is what the Triton kernels (`triton_experts`) must equal. Parameters are the
module's own, read in place. Routers choose as `models.routing` hooks them to: with the bias that balances loads, where
one was given, and with what they chose written down for a pass that records routes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.models.attention.registry import Context
from tidemill.models.mixture import experts, routing


@dataclass(frozen=True, slots=True)
class Shared:
    """An expert that every token goes through; `scale` (1, width) weighs it by a sigmoid of the token, if given."""

    gate: Tensor  # (inner, width)
    up: Tensor
    down: Tensor  # (width, inner)
    scale: Tensor | None


class Elsewhere(Protocol):
    """Experts that lie on several ranks (`ranks.experts`)."""

    def forward(self, module: Any, h: Tensor, chosen: Tensor, shares: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Mixture:
    """One layer's router and experts. `number` counts the layers that have some, as recorded routes do."""

    number: int
    gate: Any  # the router module: its weight and, where it has one, its bias are read at every pass
    kind: routing.RouterKind
    sums_to_one: bool
    module: Any  # the experts: stacks (experts, 2 · inner, width) and (experts, width, inner), read at every pass
    shared: Shared | None
    over: Elsewhere | None = None  # None: all experts are here

    @property
    def k(self) -> int:
        return int(self.gate.top_k)

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.gate, routing.PLACE if self.kind.has_place else routing.GIVEN, None)


def is_mixture(mlp: Any) -> bool:
    return routing.gate_of(mlp) is not None


def is_known(mlp: Any) -> bool:
    """Whether this file computes what the module does: a router of a known kind, and stacked, gated experts as they
    were made (no adapters on them, not narrowed)."""
    has_kind = type(routing.gate_of(mlp)).__name__ in routing.KINDS
    return has_kind and experts.is_gated(mlp.experts) and not hasattr(mlp.experts, "lora_on")


def has_plain_experts(model: Any) -> bool:
    """Whether all experts of a model are without bias and rows first, and no attention has sinks: what an
    accelerator's kernels are written for."""
    return not any(
        (experts.is_gated(m) and not experts.is_known(m)) or getattr(m, "sinks", None) is not None
        for m in model.modules()
    )


def shared_of(mlp: Any) -> Any:
    """The module that every token goes through beside the experts it chose, or None."""
    return getattr(mlp, "shared_expert", None) or getattr(mlp, "shared_experts", None)


def bind(mlp: Any, number: int) -> Mixture:
    gate = routing.gate_of(mlp)
    kind = routing.KINDS[type(gate).__name__]
    sums_to_one = bool(gate.norm_topk_prob if kind.sums_to_one is None else kind.sums_to_one)
    shared = None
    if (expert := shared_of(mlp)) is not None:
        scale = getattr(mlp, "shared_expert_gate", None)
        weights = (expert.gate_proj.weight, expert.up_proj.weight, expert.down_proj.weight)
        shared = Shared(*weights, None if scale is None else scale.weight)
    return Mixture(number, gate, kind, sums_to_one, mlp.experts, shared)


def router_logits(w: Mixture, h: Tensor) -> Tensor:
    """In the precision that the router itself computes in."""
    if w.kind.has_place:
        return F.linear(h.float(), w.gate.weight.float())
    return F.linear(h, w.gate.weight, getattr(w.gate, "bias", None))


def choose(w: Mixture, logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits (tokens, experts) → the experts chosen (tokens, k) and their shares, float32."""
    scores = logits.float().sigmoid() if w.kind.has_place else logits.float().softmax(-1)
    by = scores if w.bias is None else scores + w.bias
    if getattr(w.gate, "num_group", 1) > 1:
        by = _best_groups(by, w.gate.num_group, w.gate.topk_group)
    chosen = torch.topk(by, w.k).indices
    shares = scores.gather(1, chosen)
    if w.sums_to_one:
        shares = shares / (shares.sum(-1, keepdim=True) + (routing.TINY if w.kind.has_place else 0.0))
    return chosen, shares * w.gate.routed_scaling_factor if w.kind.has_place else shares


def _best_groups(by: Tensor, groups: int, kept: int) -> Tensor:
    """Experts lie in groups, of which a token may use some: those whose two best are largest in sum."""
    apart = by.view(len(by), groups, by.shape[1] // groups)
    best = apart.topk(2, -1).values.sum(-1).topk(kept, -1).indices
    is_kept = torch.zeros(apart.shape[:2], dtype=torch.bool, device=by.device).scatter_(1, best, True)
    return apart.masked_fill(~is_kept.unsqueeze(-1), float("-inf")).view_as(by)


def record(w: Mixture, context: Context | None, chosen: Tensor) -> None:
    """Write down what was chosen, if the pass asks for it."""
    if isinstance(context, routing.Routed) and context.made is not None:
        context.made[w.number] = chosen


def forward(w: Mixture, h: Tensor, context: Context | None) -> Tensor:
    """h (tokens, width), normed, through the experts chosen for it and the shared one: what the layer adds to it."""
    chosen, shares = choose(w, router_logits(w, h))
    record(w, context, chosen)
    if w.over is None:
        made = experts.forward(w.module, h, chosen, shares.to(h.dtype))
    else:
        made = w.over.forward(w.module, h, chosen, shares)
    return made if w.shared is None else made + through_shared(w.shared, h)


def through_shared(w: Shared, h: Tensor) -> Tensor:
    made = F.linear(F.silu(F.linear(h, w.gate)) * F.linear(h, w.up), w.down)
    return made if w.scale is None else F.linear(h, w.scale).sigmoid() * made
