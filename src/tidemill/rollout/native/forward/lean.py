"""The Llama family's forward pass with few operations, over the Hugging Face module's own parameters.

On a small model most of a decode step is the cost of launching operations: this makes about twenty per layer where the
module makes about sixty. Parameters are read where they are, so the learner's in-place updates need no copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tidemill.models import families, routing, rowwise
from tidemill.models.attention.registry import AttentionForm, Context, attention_window
from tidemill.rollout.native.forward import mixture
from tidemill.rollout.native.forward.mixture import Mixture
from tidemill.rollout.native.kernels import Kernels

# A large weight with few rows is read once and never rearranged by our own product; the library's takes up to twice as
# long (60 M parameters, one thread: 41 ms against 24 for 2 rows, 35 against 27 for 4, 39 against 38 for 8).
FEW_ROWS, LARGE_WEIGHT = 6, 1 << 16
# Rotary tables that depend on nothing but the position; "dynamic" and "longrope" look at the sequence's length.
STATIC_ROPE = ("default", "linear", "llama3", "yarn")


def supports(model: Any) -> bool:
    """Whether its layers are: norm, attention with rotary positions, norm, gated SiLU or a router and experts."""
    if type(model).__name__.removesuffix("ForCausalLM") not in families.llama_forms(mixtures=True).values():
        return False
    config = model.config
    return (
        config.hidden_act == "silu"
        and model.model.rotary_emb.rope_type in STATIC_ROPE
        and all(type(m) is nn.Linear for layer in model.model.layers for m in _linears(layer))
        and all(mixture.is_known(mlp) for mlp in _mixtures(model))
        and not any(routing.has_foreign_hooks(m) for m in model.modules())
    )


def _linears(layer: Any) -> tuple[Any, ...]:
    a, m = layer.self_attn, layer.mlp
    if mixture.is_mixture(m):
        m = mixture.shared_of(m)
    gated = () if m is None else (m.gate_proj, m.up_proj, m.down_proj)
    return a.q_proj, a.k_proj, a.v_proj, a.o_proj, *gated


def _mixtures(model: Any) -> list[Any]:
    return [layer.mlp for layer in model.model.layers if mixture.is_mixture(layer.mlp)]


def numbered(model: Any) -> list[tuple[Any, int]]:
    """Every layer, and how many layers before it have experts: recorded routes count those alone."""
    number, found = 0, []
    for layer in model.model.layers:
        found.append((layer, number))
        number += mixture.is_mixture(layer.mlp)
    return found


Weight = tuple[Tensor, Tensor | None]  # and bias


@dataclass(frozen=True, slots=True)
class Gated:
    gate: Weight
    up: Weight
    down: Weight


@dataclass(frozen=True, slots=True)
class _Layer:
    norm_in: Tensor
    q: Weight
    k: Weight
    v: Weight
    o: Weight
    q_norm: Tensor | None
    k_norm: Tensor | None
    norm_mlp: Tensor
    mlp: Gated | Mixture
    window: int | None


class LeanRunner:
    def __init__(self, model: Any, max_len: int, kernels: Kernels | None = None) -> None:
        self.model = model
        self.kernels = kernels
        config = model.config
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.eps = config.rms_norm_eps
        self.scale = model.model.layers[0].self_attn.scaling
        self.bind()
        self.cos, self.sin = rotary_tables(model, self.dim, max_len)

    def bind(self) -> None:
        """Look the parameters up again: only needed when they were replaced, not when they were changed in place."""
        body = self.model.model
        self.layers = [_bind(layer, number) for layer, number in numbered(self.model)]
        self.embed = body.embed_tokens.weight
        self.norm = body.norm.weight
        self.head: Weight = (self.model.lm_head.weight, self.model.lm_head.bias)

    def forward(self, ids: Tensor, positions: Tensor, context: Context, keep: Tensor | None) -> Tensor:
        x = F.embedding(ids, self.embed)
        for i, layer in enumerate(self.layers):
            x = self._layer(i, layer, x, positions, context)
        if keep is not None:
            x = x.index_select(0, keep)
        x = self._norm(x, self.norm)
        return self._linear(x, *self.head)

    def _layer(self, i: int, w: _Layer, x: Tensor, positions: Tensor, context: Context) -> Tensor:
        tokens = x.shape[0]
        h = self._norm(x, w.norm_in)
        q = self._linear(h, *w.q).view(tokens, -1, self.dim)
        k = self._linear(h, *w.k).view(tokens, -1, self.dim)
        v = self._linear(h, *w.v).view(tokens, -1, self.dim)
        q, k = self._rotate(q, w.q_norm, positions), self._rotate(k, w.k_norm, positions)
        a = context.attend(i, q, k, v, AttentionForm(self.scale, w.window)).reshape(tokens, -1)
        x = self._add(x, a, *w.o)
        return self._feed_forward(x, self._norm(x, w.norm_mlp), w.mlp, context)

    def _feed_forward(self, x: Tensor, h: Tensor, w: Gated | Mixture, context: Context) -> Tensor:
        if isinstance(w, Mixture):
            return mixture.forward(w, h, context).add_(x)
        h = self._gate(self._linear(h, *w.gate), self._linear(h, *w.up))
        return self._add(x, h, *w.down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.kernels is not None:
            return self.kernels.rms(x, weight, self.eps)
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def _rotate(self, x: Tensor, norm: Tensor | None, positions: Tensor) -> Tensor:
        """x (tokens, heads, dim) normed and turned to its position; may work in place."""
        if self.kernels is not None:
            self.kernels.rotate(x, norm, self.cos, self.sin, positions, self.eps)
            return x
        if norm is not None:
            x = F.rms_norm(x, norm.shape, norm, self.eps)
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        return (x * cos).addcmul_(x.roll(self.dim // 2, -1), sin)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._is_few(x, weight):
            return rowwise.linear(x, weight, bias)
        return F.linear(x, weight, bias)

    def _is_few(self, x: Tensor, weight: Tensor) -> bool:
        return self.kernels is not None and x.shape[0] <= FEW_ROWS and weight.numel() >= LARGE_WEIGHT

    def _add(self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._is_few(x, weight):
            return rowwise.linear(x, weight, bias).add_(residual)
        out = torch.addmm(residual, x, weight.t())
        return out if bias is None else out.add_(bias)

    def _gate(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.kernels is not None:
            return self.kernels.gate(gate, up)
        return F.silu(gate, inplace=True).mul_(up)


def _bind(layer: Any, number: int) -> _Layer:
    a, m = layer.self_attn, layer.mlp
    q, k, v, o, *gated = ((linear.weight, linear.bias) for linear in _linears(layer))
    return _Layer(
        norm_in=layer.input_layernorm.weight,
        q=q, k=k, v=v, o=o,
        q_norm=a.q_norm.weight if hasattr(a, "q_norm") else None,
        k_norm=a.k_norm.weight if hasattr(a, "k_norm") else None,
        norm_mlp=layer.post_attention_layernorm.weight,
        mlp=mixture.bind(m, number) if mixture.is_mixture(m) else Gated(*gated),
        window=attention_window(a),
    )  # fmt: skip


def rotary_tables(model: Any, dim: int, max_len: int) -> tuple[Tensor, Tensor]:
    """cos and signed sin, (max_len, 1, dim): rotated(x) = x * cos + swap_halves(x) * sin. In the model's own dtype, as
    its module would use them."""
    like = model.model.embed_tokens.weight
    with torch.no_grad():
        positions = torch.arange(max_len, device=like.device).unsqueeze(0)
        cos, sin = model.model.rotary_emb(like[:1], positions)
    sin = sin[0].clone()
    sin[:, : dim // 2].neg_()
    return cos[0].unsqueeze(1).contiguous(), sin.unsqueeze(1).contiguous()
