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
from tidemill.models.parts import decoder_of
from tidemill.models.vision.eyes.eyes import Seen
from tidemill.rollout.native.forward import mixture
from tidemill.rollout.native.forward.lean import add_deep, embedded, numbered, rotary_tables, turns_at
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
class _Layer:
    norm_in: Tensor
    qkv: tuple[Tensor, Tensor | None]
    out: tuple[Tensor, Tensor | None]
    norms: tuple[Tensor, Tensor] | None
    shared: Gated | None  # the mixture's expert that every token goes through
    norm_mlp: Tensor
    mlp: Gated | Mixture
    window: int | None


class FusedRunner:
    def __init__(self, model: Any, max_len: int, kernels: FusedKernels) -> None:
        config, decoder = model.config.get_text_config(), decoder_of(model)
        self.model = model
        self.kernels = kernels
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.eps = config.rms_norm_eps
        self.scale = decoder.layers[0].self_attn.scaling
        self.layers = [_bind(layer, number) for layer, number in numbered(model)]
        self.embed = decoder.embed_tokens.weight
        self.norm = decoder.norm.weight
        self.head = model.lm_head.weight
        self.cos, self.sin = rotary_tables(model, self.dim, max_len)

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
        qkv = F.linear(kernels.rms(x, w.norm_in, self.eps), *w.qkv)
        kernels.rotate(qkv, (self.heads, self.kv_heads), w.norms, turns, self.eps)
        q, k, v = torch.split(qkv.view(tokens, -1, dim), [self.heads, self.kv_heads, self.kv_heads], 1)
        a = context.attend(i, q, k, v, AttentionForm(self.scale, w.window)).reshape(tokens, -1)
        x.addmm_(a, w.out[0].t())
        if w.out[1] is not None:
            x.add_(w.out[1])
        self._feed_forward(x, kernels.rms(x, w.norm_mlp, self.eps), w, context)

    def _feed_forward(self, x: Tensor, h: Tensor, w: _Layer, context: Context) -> None:
        if isinstance(w.mlp, Gated):
            self._gated(x, h, w.mlp)
            return
        if w.shared is not None:
            self._gated(x, h, w.shared)
        mix = w.mlp
        chosen, shares = self.kernels.route(F.linear(h, mix.gate.weight), mix.bias, mix.k, mix.sums_to_one)
        mixture.record(mix, context, chosen)
        self.kernels.add_experts(x, h, chosen, shares, (mix.module.gate_up_proj, mix.module.down_proj))

    def _gated(self, x: Tensor, h: Tensor, w: Gated) -> None:
        made = self.kernels.gate(F.linear(h, w.gate_up))
        if w.scale is not None:
            made.mul_(F.linear(h, w.scale).sigmoid())
        x.addmm_(made, w.down.t())

    @property
    def device_kernels(self) -> FusedKernels:
        return self.kernels


def float_logits(x: Tensor, head: Tensor) -> Tensor:
    """In float32: rounding logits to bfloat16 alone would move log-probabilities by hundredths."""
    if x.dtype == torch.float32 or x.device.type == "cpu":
        return F.linear(x, head)
    return torch.mm(x, head.t(), out_dtype=torch.float32)


def _bind(layer: Any, number: int) -> _Layer:
    a, m = layer.self_attn, layer.mlp
    weight, bias = join(a.q_proj, a.k_proj, a.v_proj)
    shared = mixture.shared_of(m) if mixture.is_mixture(m) else None
    return _Layer(
        norm_in=layer.input_layernorm.weight,
        qkv=(weight, bias),
        out=(a.o_proj.weight, a.o_proj.bias),
        norms=(a.q_norm.weight, a.k_norm.weight) if hasattr(a, "q_norm") else None,
        norm_mlp=layer.post_attention_layernorm.weight,
        mlp=mixture.bind(m, number) if mixture.is_mixture(m) else bind_gated(m),
        shared=None if shared is None else bind_gated(shared, getattr(m, "shared_expert_gate", None)),
        window=attention_window(a),
    )


def bind_gated(m: Any, scale: Any = None) -> Gated:
    gate_up, _ = join(m.gate_proj, m.up_proj)
    return Gated(gate_up, m.down_proj.weight, None if scale is None else scale.weight)


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
