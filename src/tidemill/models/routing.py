"""Who goes to which expert, in models whose routers choose by softmax: counted, balanced, recorded and replayed.

Routers stay transformers' own; a hook sees what each chose and may change it. What a forward pass wants of them travels
in its attention context, wrapped in `Routed`: so it holds for recomputed layers and for micro-batches in flight.

* **Replay**: the experts that rollout chose are chosen again, so learner and rollout differ in weights, not in routes.
* **Bias** (balance without a loss): each expert has a number that is added when experts are chosen, not when they are
  weighed; after an update it falls for experts that had too much and rises for those that had too little.
* **Auxiliary loss**: coef · E · Σ_e f_e · P_e for every token that learns, weighed as its policy loss is. f_e is the
  share that expert e had in the update before, so the loss is a sum over tokens and means the same however a step is
  cut.

Loads are those of tokens that learn: each counts once for every target it predicts, so a prompt that a group shares
counts as much as one that is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tidemill.config import Mixture
from tidemill.errors import ModelError
from tidemill.models.attention import Context

# Routers that give (logits, weights of the chosen, chosen) and weigh by the softmax of the logits; whether the chosen
# weights are made to sum to 1.
SUMS_TO_ONE: dict[str, bool | None] = {  # None: the module's own norm_topk_prob says
    "MixtralTopKRouter": True,
    "Qwen3MoeTopKRouter": None,
    "Qwen2MoeTopKRouter": None,
    "OlmoeTopKRouter": None,
}


@dataclass(slots=True)
class Routed:
    """An attention context that also says how the tokens of its pass are routed."""

    inner: Context
    counts: Tensor | None = None  # (tokens,) how often each counts in loads: once for each target. None: not learning
    routes: Tensor | None = None  # (tokens, layers, k), -1 where the router chooses for itself
    weights: Tensor | None = None  # (tokens,) how much each learns
    made: dict[int, Tensor] | None = None  # filled with what each layer chose, if a dict is given

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        return self.inner.attend(layer, q, k, v, scale, window, softcap)


class Routers:
    """All routers of a model, hooked. Get it by `of`, which attaches it once."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.settings = Mixture()
        self.share = 1.0  # of the auxiliary loss that this rank counts, where several compute the same tokens
        found = [(layer, gate) for layer in model.get_decoder().layers if (gate := _gate(layer)) is not None]
        self.layers, self.k = len(found), int(found[0][1].top_k) if found else 0
        self.experts = int(found[0][1].weight.shape[0]) if found else 0
        shape = (self.layers, self.experts)
        self.bias, self.counts, self.chances = (torch.zeros(shape, device=device) for _ in range(3))
        self.load = torch.full(shape, 1.0 / max(1, self.experts), device=device)  # of the update before
        self.replayed = torch.zeros(2, device=device)  # routes replayed; of them those the router would have chosen
        self._context: list[Any] = [None] * self.layers
        for at, (layer, gate) in enumerate(found):
            layer.register_forward_pre_hook(partial(self._enter, at), with_kwargs=True)
            gate.register_forward_hook(partial(self._choose, at))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, at: int, layer: Any, args: Any, kwargs: Any) -> None:
        context = kwargs.get("tide")
        self._context[at] = context if isinstance(context, Routed) else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _choose(self, at: int, gate: Any, args: Any, out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        logits, weights, index = out
        context, biased = self._context[at], self.settings.balance == "bias"
        if context is None and not biased:
            return out
        p = logits.float().softmax(-1)
        chosen = torch.topk(p.detach() + self.bias[at], self.k).indices if biased else index
        if context is not None and context.routes is not None:
            chosen = self._replay(context.routes[:, at], chosen, context.counts is not None)
        if chosen is not index:
            weights = _weigh(gate, p, chosen).to(weights.dtype)
        if context is not None and context.made is not None:
            context.made[at] = chosen
        if context is not None and context.counts is not None:
            self._count(at, p.detach(), chosen, context.counts)
            if self.settings.balance == "aux_loss" and context.weights is not None:
                chance = (p * self.load[at]).sum(-1) * context.weights
                loss = self.share * self.settings.coef * self.experts * chance.sum()
                weights = _Beside.apply(weights, loss)  # type: ignore[no-untyped-call]
        return logits, weights, chosen

    def _replay(self, routes: Tensor, own: Tensor, counted: bool) -> Tensor:
        known = routes[:, :1] >= 0
        if counted:
            agree = ((routes.unsqueeze(-1) == own.unsqueeze(1)).any(-1) & known).sum()
            self.replayed += torch.stack([known.sum() * self.k, agree])
        return torch.where(known, routes, own)

    def _count(self, at: int, p: Tensor, chosen: Tensor, counts: Tensor) -> None:
        self.counts[at].index_add_(0, chosen.reshape(-1), counts.repeat_interleave(self.k))
        self.chances[at] += counts @ p

    def sums(self) -> list[Tensor]:
        """To be added up over ranks before `finish`; ranks that count the same tokens change no share."""
        return [self.counts, self.chances, self.replayed]

    def finish(self) -> dict[str, float]:
        """After an update: what it says of the experts' loads; the bias moves."""
        if not float(self.counts.sum()):
            return {}
        load = self.counts / self.counts.sum(-1, keepdim=True).clamp(min=1.0)
        chance = self.chances / self.chances.sum(-1, keepdim=True).clamp(min=1e-9)
        if self.settings.balance == "bias":
            self.bias += self.settings.bias_rate * torch.sign(load.mean(-1, keepdim=True) - load)
        busiest = load.amax(-1) * self.experts
        found = {
            "moe_busiest": float(busiest.mean()),  # 1: even
            "moe_busiest_layer": float(busiest.amax()),
            "moe_idle_share": float((self.counts == 0).float().mean()),
            "moe_balance_loss": float((load * chance).sum(-1).mean() * self.experts),
        }
        if float(self.replayed[0]):
            found["moe_replay_agreement"] = float(self.replayed[1] / self.replayed[0])
        self.load = load
        for x in self.sums():
            x.zero_()
        return found

    def state(self) -> dict[str, Tensor]:
        return {"routers.bias": self.bias, "routers.load": self.load}

    def restore(self, tensors: Any) -> None:
        if "routers.bias" in tensors:
            self.bias.copy_(tensors["routers.bias"])
            self.load = tensors["routers.load"].to(self.bias.device).clone()


def of(model: Any, device: torch.device | None = None) -> Routers | None:
    """The model's routers; None if it has none of the known kinds. `device`: where the model will be, if not yet."""
    if "tide_routers" not in model.__dict__:
        has_some = any(_gate(layer) is not None for layer in model.get_decoder().layers)
        device = device or next(model.parameters()).device
        model.__dict__["tide_routers"] = Routers(model, device) if has_some else None
    routers: Routers | None = model.__dict__["tide_routers"]
    return routers


def prepare(model: Any, settings: Mixture, device: torch.device | None = None) -> Routers | None:
    """Routers that balance and replay as a recipe says; refuses what the model cannot do."""
    routers = of(model, device)
    if routers is None:
        if settings.balance != "none" or settings.replay:
            raise ModelError(
                f"{type(model).__name__} has no routers that learn.moe can balance or replay",
                f"leave learn.moe out; it works with {', '.join(SUMS_TO_ONE)}",
            )
        return None
    routers.settings = settings
    return routers


def _gate(layer: Any) -> Any:
    block = next((m for m in layer.children() if hasattr(m, "experts") and hasattr(m, "gate")), None)
    return block.gate if block is not None and type(block.gate).__name__ in SUMS_TO_ONE else None


def _weigh(gate: Any, p: Tensor, chosen: Tensor) -> Tensor:
    """As the router itself weighs, of experts that it did not choose."""
    picked = p.gather(1, chosen)
    sums_to_one = SUMS_TO_ONE[type(gate).__name__]
    if gate.norm_topk_prob if sums_to_one is None else sums_to_one:
        picked = picked / picked.sum(-1, keepdim=True)
    return picked


class _Beside(torch.autograd.Function):
    """Hands x on and lets `loss` be part of whatever loss x goes into. So a loss of one layer reaches its weights in
    any backward pass that reaches the layer: in a pipeline's stage, and in a layer that is computed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.like)
