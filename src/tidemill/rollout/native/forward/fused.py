"""The Llama family's forward pass for an accelerator: joined projections, Triton kernels between them.

The three input projections of attention become one matrix, gate and up another. The module's parameters become views of
them: no second copy, and what the learner changes in place is what the engine reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.models.attention.registry import AttentionForm, Context, attention_window
from tidemill.models.layers.eight import EightWeight, Rounded
from tidemill.models.parts import decoder_of
from tidemill.models.vision.eyes.eyes import Seen
from tidemill.rollout.native.forward import mixture
from tidemill.rollout.native.forward.lean import (
    Weight,
    add_deep,
    eight_weights,
    embedded,
    numbered,
    rotary_tables,
    turns_at,
)
from tidemill.rollout.native.forward.mixture import Mixture


class FusedKernels(Protocol):
    """What is computed between the matrix products; `triton_kernels.TritonKernels` says what each does."""

    def rms(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def turns(self, cos: Tensor, sin: Tensor, position: Tensor) -> tuple[Tensor, ...]: ...

    def rotate(
        self, x: Tensor, heads: tuple[int, int], norms: tuple[Tensor, Tensor] | None, turns: tuple[Tensor, ...],
        eps: float,
    ) -> None: ...  # fmt: skip

    def gate(self, x: Tensor) -> Tensor: ...

    def route(self, logits: Tensor, bias: Tensor | None, k: int, sums_to_one: bool) -> tuple[Tensor, Tensor]: ...

    def add_experts(
        self, x: Tensor, h: Tensor, chosen: Tensor, shares: Tensor, stacks: tuple[Tensor, Tensor]
    ) -> None: ...

    def draw(
        self, logits: Tensor, source: Tensor, slot: Tensor, position: Tensor, state: Any
    ) -> tuple[Tensor, Tensor]: ...


class RoundingKernels(FusedKernels, Protocol):
    """Those that also make the inputs of 8-bit products."""

    def rounded(self, x: Tensor, dtype: torch.dtype) -> Rounded: ...

    def rms_rounded(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Rounded: ...

    def gate_rounded(self, x: Tensor, dtype: torch.dtype) -> Rounded: ...


class WalkingKernels(FusedKernels, Protocol):
    """Those that attend over pages themselves; for others `paged.attend` does."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, table: Tensor, length: Tensor,
        form: AttentionForm, *, scales: tuple[Tensor, Tensor] | None,
    ) -> Tensor: ...  # fmt: skip

    def reads_cache(self, k: Tensor, v: Tensor) -> bool:
        """Whether `attend` wants the new keys and values written before it is called."""


@dataclass(frozen=True, slots=True)
class Gated:
    gate_up: Tensor
    down: Tensor
    scale: Tensor | None = None  # (1, width): weighs it by a sigmoid of the token


@dataclass(frozen=True, slots=True)
class EightGated:
    gate_up: EightWeight
    down: EightWeight


@dataclass(frozen=True, slots=True)
class _Layer:
    norm_in: Tensor
    qkv: Weight
    out: Weight
    norms: tuple[Tensor, Tensor] | None
    shared: Gated | None  # the mixture's expert that every token goes through
    norm_mlp: Tensor
    mlp: Gated | EightGated | Mixture
    window: int | None


class FusedRunner:
    """`eight`: the products of attention and dense MLPs are of this 8-bit type, by `RoundingKernels`."""

    def __init__(self, model: Any, max_len: int, kernels: Any, eight: torch.dtype | None = None) -> None:
        config, decoder = model.config.get_text_config(), decoder_of(model)
        self.model = model
        self.kernels: Any = kernels  # `RoundingKernels` with 8-bit weights, else `FusedKernels`
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.eps = config.rms_norm_eps
        self.scale = decoder.layers[0].self_attn.scaling
        self.layers = [_bind(layer, number, eight) for layer, number in numbered(model)]
        self.eight = eight
        self.embed = decoder.embed_tokens.weight
        self.norm = decoder.norm.weight
        self.head = model.lm_head.weight
        self.cos, self.sin = rotary_tables(model, self.dim, max_len)

    def refresh(self) -> None:
        """Make 8-bit weights again from the parameters."""
        for weight in eight_weights(self.layers):
            weight.refresh()

    def forward(
        self, ids: Tensor, positions: Tensor, context: Context, keep: Tensor | None, seen: Seen | None = None
    ) -> Tensor:
        x = embedded(ids, self.embed, seen)
        tables, positions = turns_at(self.model, (self.cos, self.sin), positions)
        turns = self.kernels.turns(*tables, positions)
        for i, layer in enumerate(self.layers):
            self._layer(i, layer, x, turns, context)
            add_deep(x, i, seen)
        if keep is not None:
            x = x.index_select(0, keep)
        return float_logits(self.kernels.rms(x, self.norm, self.eps), self.head)

    def _layer(self, i: int, w: _Layer, x: Tensor, turns: tuple[Tensor, ...], context: Context) -> None:
        """Adds the layer's two branches to x, each in the product that ends it."""
        tokens, dim = x.shape[0], self.dim
        kernels = self.kernels
        qkv = _linear(self._norm(x, w.norm_in, self.eight), *w.qkv)
        kernels.rotate(qkv, (self.heads, self.kv_heads), w.norms, turns, self.eps)
        q, k, v = torch.split(qkv.view(tokens, -1, dim), [self.heads, self.kv_heads, self.kv_heads], 1)
        a = context.attend(i, q, k, v, AttentionForm(self.scale, w.window)).reshape(tokens, -1)
        self._add(x, a if self.eight is None else kernels.rounded(a, self.eight), w.out[0])
        if w.out[1] is not None:
            x.add_(w.out[1])
        self._feed_forward(x, w, context)

    def _norm(self, x: Tensor, weight: Tensor, eight: torch.dtype | None) -> Any:
        """As the product after it takes it."""
        if eight is None:
            return self.kernels.rms(x, weight, self.eps)
        return self.kernels.rms_rounded(x, weight, self.eps, eight)

    def _add(self, x: Tensor, a: Any, weight: Tensor | EightWeight) -> None:
        if isinstance(weight, EightWeight):
            x.add_(weight.multiply(a))
        else:
            x.addmm_(a, weight.t())

    def _feed_forward(self, x: Tensor, w: _Layer, context: Context) -> None:
        if isinstance(w.mlp, EightGated):
            made = w.mlp.gate_up.multiply(self._norm(x, w.norm_mlp, self.eight))
            self._add(x, self.kernels.gate_rounded(made, self.eight), w.mlp.down)
            return
        h = self._norm(x, w.norm_mlp, None)  # routers and experts stay as they are
        feed_forward(self.kernels, x, h, w.mlp, w.shared, context)

    @property
    def device_kernels(self) -> FusedKernels:
        kernels: FusedKernels = self.kernels
        return kernels


def feed_forward(kernels: Any, x: Tensor, h: Tensor, mlp: Any, shared: Gated | None, context: Context) -> None:
    """Add a layer's gated MLP, or its mixture and the expert that all tokens share."""
    if isinstance(mlp, Gated):
        _gated(kernels, x, h, mlp)
        return
    if shared is not None:
        _gated(kernels, x, h, shared)
    chosen, shares = kernels.route(F.linear(h, mlp.gate.weight), mlp.bias, mlp.k, mlp.sums_to_one)
    mixture.record(mlp, context, chosen)
    kernels.add_experts(x, h, chosen, shares, (mlp.module.gate_up_proj, mlp.module.down_proj))


def _gated(kernels: Any, x: Tensor, h: Tensor, w: Gated) -> None:
    made = kernels.gate(F.linear(h, w.gate_up))
    if w.scale is not None:
        made.mul_(F.linear(h, w.scale).sigmoid())
    x.addmm_(made, w.down.t())


def _linear(x: Any, weight: Tensor | EightWeight, bias: Tensor | None) -> Tensor:
    return weight.multiply(x, bias) if isinstance(weight, EightWeight) else F.linear(x, weight, bias)


def float_logits(x: Tensor, head: Tensor) -> Tensor:
    """In float32: rounding logits to bfloat16 alone would move log-probabilities by hundredths."""
    if x.dtype == torch.float32 or x.device.type == "cpu":
        return F.linear(x, head)
    return torch.mm(x, head.t(), out_dtype=torch.float32)


def _bind(layer: Any, number: int, eight: torch.dtype | None) -> _Layer:
    a, m = layer.self_attn, layer.mlp
    out = a.o_proj.weight if eight is None else EightWeight([a.o_proj.weight], eight)
    shared = mixture.shared_of(m) if mixture.is_mixture(m) else None
    return _Layer(
        norm_in=layer.input_layernorm.weight,
        qkv=join(a.q_proj, a.k_proj, a.v_proj) if eight is None else _join_eight(eight, a.q_proj, a.k_proj, a.v_proj),
        out=(out, a.o_proj.bias),
        norms=(a.q_norm.weight, a.k_norm.weight) if hasattr(a, "q_norm") else None,
        norm_mlp=layer.post_attention_layernorm.weight,
        mlp=mixture.bind(m, number) if mixture.is_mixture(m) else _bind_mlp(m, eight),
        shared=None if shared is None else bind_gated(shared, getattr(m, "shared_expert_gate", None)),
        window=attention_window(a),
    )


def _bind_mlp(m: Any, eight: torch.dtype | None) -> Gated | EightGated:
    if eight is None:
        return bind_gated(m)
    gate_up = EightWeight([m.gate_proj.weight, m.up_proj.weight], eight)
    return EightGated(gate_up, EightWeight([m.down_proj.weight], eight))


def bind_gated(m: Any, scale: Any = None) -> Gated:
    gate_up, _ = join(m.gate_proj, m.up_proj)
    return Gated(gate_up, m.down_proj.weight, None if scale is None else scale.weight)


def _join_eight(eight: torch.dtype, *linears: Any) -> Weight:
    """One 8-bit matrix made from the modules' weights, and one bias that is theirs."""
    bias = None if linears[0].bias is None else _joined([linear.bias for linear in linears])
    return EightWeight([linear.weight for linear in linears], eight), bias


def join(*linears: Any) -> tuple[Tensor, Tensor | None]:
    """One matrix (and bias) whose row blocks are the modules' own parameters from now on."""
    weight = _joined([linear.weight for linear in linears])
    bias = None if linears[0].bias is None else _joined([linear.bias for linear in linears])
    return weight, bias


@torch.no_grad()
def _joined(parameters: list[Tensor]) -> Tensor:
    first, rows = parameters[0], [p.shape[0] for p in parameters]
    if first._is_view() or first.untyped_storage().nbytes() == sum(p.nbytes for p in parameters):
        whole = first.data.as_strided((sum(rows), *first.shape[1:]), first.stride())  # joined by an engine before
        if all(p.data_ptr() == part.data_ptr() for p, part in zip(parameters, torch.split(whole, rows))):
            return whole
    whole = torch.cat([p.data for p in parameters])
    for parameter, part in zip(parameters, torch.split(whole, rows)):
        parameter.data = part
    return whole
