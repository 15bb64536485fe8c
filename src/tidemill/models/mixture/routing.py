"""Who goes to which expert: counted, balanced, recorded and replayed.

Routers stay transformers' own; a hook sees what each chose and may change it. What a forward pass wants of them travels
in its attention context, wrapped in `Routed`: so it holds for recomputed layers and for micro-batches in flight.

* **Replay**: the experts that rollout chose are chosen again, so learner and rollout differ in weights, not in routes.
* **Bias** (balance without a loss): each expert has a number that is added when experts are chosen, not when they are
  weighed; after an update it falls for experts that had too much and rises for those that had too little. Routers of
  DeepSeek-V3's kind have a place for it, which is part of the model (`PLACE`); others are given one (`GIVEN`), which is
  part of the run alone. Either is a buffer, so it goes wherever weights go.
* **Auxiliary loss**: coef · E · Σ_e f_e · P_e for every token that learns, weighed as its policy loss is. f_e is the
  share that expert e had in the update before, so the loss is a sum over tokens and means the same however a step is
  cut.

Loads are those of tokens that learn: each counts once for every target it predicts, so a prompt that a group shares
counts as much as one that is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tidemill.errors import ModelError
from tidemill.models.attention.registry import AttentionForm, Context, serving
from tidemill.models.lora import Reference
from tidemill.models.parts import layers_of

if TYPE_CHECKING:  # rollout alone needs no settings, so it can be used without their library
    from tidemill.recipe.config import Mixture

PLACE = "e_score_correction_bias"
GIVEN = "tide_bias"
TINY = 1e-20  # added by routers with a place of their own to the sum that they divide by


@dataclass(frozen=True, slots=True)
class RouterKind:
    """A router that gives (logits, weights of the chosen, chosen)."""

    sums_to_one: bool | None = (
        None  # whether the chosen weights are made to; None: the module's own norm_topk_prob says
    )
    has_place: bool = False  # scores are sigmoids, chosen with PLACE added, and weights are scaled; else a softmax


KINDS = {
    # GPT-OSS takes the softmax of the chosen logits alone: that of all, made to sum to one.
    **dict.fromkeys(("MixtralTopKRouter", "GptOssTopKRouter", "Qwen3_5MoeTopKRouter"), RouterKind(sums_to_one=True)),
    **dict.fromkeys(
        ("Qwen3MoeTopKRouter", "Qwen2MoeTopKRouter", "Qwen3NextTopKRouter", "OlmoeTopKRouter"), RouterKind()
    ),
    **dict.fromkeys(
        (
            "DeepseekV3TopkRouter",
            "DeepseekV32TopkRouter",
            "Glm4MoeTopkRouter",
            "Glm4MoeLiteTopkRouter",
            "Dots1TopkRouter",
            "ExaoneMoeTopkRouter",
            "SolarOpenTopkRouter",
        ),
        RouterKind(has_place=True),
    ),
}


@dataclass(slots=True)
class Routed:
    """An attention context that also says how the tokens of its pass are routed."""

    inner: Context
    counts: Tensor | None = None  # (tokens,) how often each counts in loads: once for each target. None: not learning
    routes: Tensor | None = None  # (tokens, layers, k), -1 where the router chooses for itself
    weights: Tensor | None = None  # (tokens,) how much each learns
    made: dict[int, Tensor] | None = None  # filled with what each layer chose, if a dict is given

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
        return self.inner.attend(layer, q, k, v, form)

    def recur(self, call: Any) -> Any:
        return self.inner.recur(call)  # type: ignore[attr-defined]


class Routers:
    """All routers of a model, hooked. Get it by `of`, which attaches it once."""

    def __init__(self, model: Any, device: torch.device) -> None:
        from tidemill.recipe.config import Mixture

        self.settings = Mixture()
        self.share = 1.0  # of the auxiliary loss that this rank counts, where several compute the same tokens
        found = [(layer, gate) for layer in layers_of(model) if (gate := _gate(layer)) is not None]
        self.layers, self.k = len(found), int(found[0][1].top_k) if found else 0
        self.experts = int(found[0][1].weight.shape[0]) if found else 0
        self.gates = [gate for _, gate in found]
        shape = (self.layers, self.experts)
        self.counts, self.chances = (torch.zeros(shape, device=device) for _ in range(2))
        self.load = torch.full(shape, 1.0 / max(1, self.experts), device=device)  # of the update before
        self.replayed = torch.zeros(2, device=device)  # routes replayed; of them those the router would have chosen
        self._context: list[Any] = [None] * self.layers
        self._hooks = []
        for at, (layer, gate) in enumerate(found):
            self._hooks.append(layer.register_forward_pre_hook(partial(self._enter, at), with_kwargs=True))
            self._hooks.append(gate.register_forward_hook(partial(self._choose, at)))

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, at: int, layer: Any, args: Any, kwargs: Any) -> None:
        context = serving(kwargs)
        self._context[at] = context if isinstance(context, Routed) else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _choose(self, at: int, gate: Any, args: Any, out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        logits, weights, index = out
        context, given = self._context[at], getattr(gate, GIVEN, None)
        if context is None and given is None:
            return out
        scores = _scores(gate, logits)
        p = scores / scores.sum(-1, keepdim=True) if _kind(gate).has_place else scores
        chosen = index if given is None else torch.topk(scores.detach() + given, self.k).indices
        if context is not None and context.routes is not None:
            chosen = self._replay(context.routes[:, at], chosen, context.counts is not None and not _is_again())
        if chosen is not index:
            weights = _weigh(gate, scores, chosen).to(weights.dtype)
        if context is not None and context.made is not None:
            context.made[at] = chosen
        if context is not None and context.counts is not None:
            if not _is_again():
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
        """After an update: what it says of the experts' loads; the bias moves. All numbers come in one copy, because
        each would wait for the device."""
        load = self.counts / self.counts.sum(-1, keepdim=True).clamp(min=1.0)
        chance = self.chances / self.chances.sum(-1, keepdim=True).clamp(min=1e-9)
        if self.settings.balance == "bias":  # of no tokens it moves nowhere
            self._move(self.settings.bias_rate * torch.sign(load.mean(-1, keepdim=True) - load))
        busiest, idle = load.amax(-1) * self.experts, (self.counts == 0).float().mean()
        loss = (load * chance).sum(-1).mean() * self.experts
        numbers = [self.counts.sum(), busiest.mean(), busiest.amax(), idle, loss, *self.replayed.unbind()]
        tokens, mean, most, idle_share, balance, replayed, agreed = torch.stack(numbers).tolist()
        if not tokens:
            return {}
        found = {"moe_busiest": mean, "moe_busiest_layer": most, "moe_idle_share": idle_share}  # busiest 1: even
        found["moe_balance_loss"] = balance
        if replayed:
            found["moe_replay_agreement"] = agreed / replayed
        self.load = load
        self.forget()
        return found

    def forget(self) -> None:
        """What was counted since the last update."""
        for x in self.sums():
            x.zero_()

    @torch.no_grad()
    def _move(self, steps: Tensor) -> None:
        for bias, step in zip(self.biases(), steps, strict=True):
            if bias is not None and not bias.is_meta:  # of a layer that is another pipeline stage's
                bias += step.to(bias)

    def biases(self) -> list[Tensor | None]:
        """Of each layer, in whichever place its router has."""
        return [getattr(gate, PLACE if _kind(gate).has_place else GIVEN, None) for gate in self.gates]

    def state(self) -> dict[str, Tensor]:
        """What a resumed run needs beside the model, whose buffers the bias is among."""
        return {"routers.load": self.load}

    def restore(self, tensors: Any) -> None:
        if "routers.load" in tensors:
            self.load = tensors["routers.load"].to(self.load.device).clone()
        if "routers.bias" in tensors:  # of a checkpoint from before the bias was a buffer of the model
            with torch.no_grad():
                for bias, row in zip(self.biases(), tensors["routers.bias"], strict=True):
                    if bias is not None:
                        bias.copy_(row)


def _is_again() -> bool:
    """Whether a layer is computed again inside a backward pass. Its tokens were counted already; rows that teach
    nothing have no backward pass and would count half."""
    return int(torch._C._current_graph_task_id()) != -1


def of(model: Any, device: torch.device | None = None) -> Routers | None:
    """The model's routers; None if it has none of the known kinds. `device`: where the model will be, if not yet."""
    if isinstance(model, Reference):  # the policy itself: hooked once more, its routers would choose twice
        model = model.model
    if getattr(model, "shares_trunk", False):  # a critic's: the layers are the policy's, whose learner sees to them
        return None
    if "tide_routers" not in model.__dict__:
        has_some = any(_gate(layer) is not None for layer in layers_of(model))
        device = device or next(model.parameters()).device
        model.__dict__["tide_routers"] = Routers(model, device) if has_some else None
    routers: Routers | None = model.__dict__["tide_routers"]
    return routers


def detach(model: Any) -> None:
    """Undo `of`, for a model that is about to be cut: then it has other routers."""
    routers: Routers | None = model.__dict__.pop("tide_routers", None)
    if routers is not None:
        routers.detach()


HARMLESS = "make_inputs_require_grads"  # transformers' hook for checkpoints of layers: it changes no number


def has_foreign_hooks(module: Any) -> bool:
    """Whether anyone but `Routers` looks into the module's calls."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not _is_known_hook(hook) for hook in hooks)


def _is_known_hook(hook: Any) -> bool:
    if HARMLESS in getattr(hook, "__qualname__", ""):
        return True
    return isinstance(getattr(getattr(hook, "func", None), "__self__", None), Routers)


def prepare(model: Any, settings: Mixture, device: torch.device | None = None) -> Routers | None:
    """Routers that balance and replay as a recipe says; refuses what the model cannot do."""
    routers = of(model, device)
    if routers is None:
        if settings.balance != "none" or settings.replay:
            raise ModelError(
                f"{type(model).__name__} has no routers that learn.moe can balance or replay",
                f"leave learn.moe out; it works with {', '.join(KINDS)}",
            )
        return None
    routers.settings = settings
    widen(model)
    if settings.balance == "bias":
        _give_places(routers.gates)
    return routers


def make_room(model: Any, settings: Mixture) -> None:
    """In a model that serves what another learns: for the bias that comes with the weights, if one does."""
    if settings.balance == "bias":
        prepare(model, settings)


def widen(model: Any) -> None:
    """The bias in float32, whatever the weights are: near 1, bfloat16 would not see a step of `bias_rate`."""
    for module in model.modules():
        if isinstance(module._buffers.get(PLACE), Tensor):
            module._buffers[PLACE] = module._buffers[PLACE].float()


def _give_places(gates: list[Any]) -> None:
    for gate in gates:
        if not _kind(gate).has_place and not hasattr(gate, GIVEN):
            gate.register_buffer(GIVEN, torch.zeros(gate.weight.shape[0], device=gate.weight.device))


def given(model: Any) -> dict[str, Tensor]:
    """Biases that no folder of the model has a place for, by name; those that are 0 everywhere change nothing."""
    return {name: b for name, b in model.named_buffers() if name.endswith(f".{GIVEN}") and bool(b.any())}


def take_away(model: Any) -> None:
    """Leave the model as its folder knows it."""
    for module in model.modules():
        module._buffers.pop(GIVEN, None)


def gate_of(block: Any) -> Any:
    """The router of a layer's block; None where the block is no mixture."""
    if not hasattr(block, "experts"):
        return None
    return getattr(block, "gate", None) or getattr(block, "router", None)


def _gate(layer: Any) -> Any:
    gate = next((gate for m in layer.children() if (gate := gate_of(m)) is not None), None)
    return gate if type(gate).__name__ in KINDS else None


def _kind(gate: Any) -> RouterKind:
    return KINDS[type(gate).__name__]


def _scores(gate: Any, logits: Tensor) -> Tensor:
    """(tokens, experts) what experts are chosen and weighed by."""
    return logits.float().sigmoid() if _kind(gate).has_place else logits.float().softmax(-1)


def _weigh(gate: Any, scores: Tensor, chosen: Tensor) -> Tensor:
    """As the router itself weighs, of experts that it did not choose."""
    kind, picked = _kind(gate), scores.gather(1, chosen)
    if gate.norm_topk_prob if kind.sums_to_one is None else kind.sums_to_one:
        picked = picked / (picked.sum(-1, keepdim=True) + (TINY if kind.has_place else 0.0))
    return picked * gate.routed_scaling_factor if kind.has_place else picked


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
