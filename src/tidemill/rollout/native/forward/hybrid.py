"""The forward pass of Qwen3-Next and Qwen3.5 for an accelerator: gated delta nets beside gated attention.

Three of four layers have a state instead of keys and values; the context moves it on (`recurrent.chunked.layer`).
Attention normalises queries and keys, turns a part of each head, and weighs its output by a sigmoid of the token.
Parameters are the module's own, read in place; norms count from 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tidemill.models.attention.registry import AttentionForm, Context
from tidemill.models.mixture import routing
from tidemill.models.parts import decoder_of
from tidemill.models.recurrent.chunked import layer as delta
from tidemill.models.recurrent.mixers import TIDE_NUMBER, call_of
from tidemill.models.vision.eyes import eyes
from tidemill.models.vision.eyes.eyes import Seen
from tidemill.rollout.native.forward import mixture
from tidemill.rollout.native.forward.fused import FusedKernels, Gated, bind_gated, feed_forward, float_logits, join
from tidemill.rollout.native.forward.mixture import Mixture

FORMS = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")


class HybridKernels(FusedKernels, Protocol):
    def rms(self, x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor: ...

    def norm_rotate(
        self, x: Tensor, stride: int, norm: Tensor, shift: float, cos: Tensor, sin: Tensor, position: Tensor, eps: float
    ) -> Tensor: ...


def supports(model: Any) -> bool:
    decoder = decoder_of(model)
    layers = getattr(decoder, "layers", None)
    if not layers or eyes.of(model) is not None:
        return False
    form = type(layers[0]).__name__.removesuffix("DecoderLayer")
    if form not in FORMS or type(model).__name__ != f"{form}ForCausalLM":
        return False
    return (
        model.config.get_text_config().hidden_act == "silu"
        and decoder.rotary_emb.rope_type == "default"
        and all(_is_known(layer) for layer in layers)
        and not any(routing.has_foreign_hooks(m) for m in (*decoder.modules(), model.get_output_embeddings()))
    )


def _is_known(layer: Any) -> bool:
    if hasattr(layer, "linear_attn"):
        known = delta.is_known(layer.linear_attn) and hasattr(layer.linear_attn, TIDE_NUMBER)
        own = layer.linear_attn
    else:
        own, known = layer.self_attn, True
    if mixture.is_mixture(layer.mlp):
        known &= mixture.is_known(layer.mlp)
    linears = [m for part in (own, layer.mlp) for m in part.modules() if isinstance(m, nn.Linear)]
    return known and all(type(m) is nn.Linear and m.bias is None for m in linears)


@dataclass(frozen=True, slots=True)
class _Attention:
    qkv: Tensor  # queries with their gates, head by head; then keys; then values
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    heads: tuple[int, int, int]  # of queries, of keys, and their width
    scale: float
    number: int  # among the layers that have keys and values


@dataclass(frozen=True, slots=True)
class _Layer:
    norm_in: Tensor
    mixer: Any  # a gated delta net, or _Attention
    norm_mlp: Tensor
    shared: Gated | None
    mlp: Gated | Mixture


class HybridRunner:
    def __init__(self, model: Any, max_len: int, kernels: HybridKernels) -> None:
        config, decoder = model.config.get_text_config(), decoder_of(model)
        self.model, self.kernels, self.eps = model, kernels, config.rms_norm_eps
        self.layers, attentions, mixtures = list[_Layer](), 0, 0
        for layer in decoder.layers:
            mixer = getattr(layer, "linear_attn", None)
            if mixer is None:
                mixer = _bind_attention(layer.self_attn, attentions)
                attentions += 1
            is_mixture = mixture.is_mixture(layer.mlp)
            shared = mixture.shared_of(layer.mlp) if is_mixture else None
            self.layers.append(
                _Layer(
                    norm_in=layer.input_layernorm.weight,
                    mixer=mixer,
                    norm_mlp=layer.post_attention_layernorm.weight,
                    shared=None if shared is None else bind_gated(shared, layer.mlp.shared_expert_gate),
                    mlp=mixture.bind(layer.mlp, mixtures) if is_mixture else bind_gated(layer.mlp),
                )
            )
            mixtures += is_mixture
        self.embed, self.norm, self.head = decoder.embed_tokens.weight, decoder.norm.weight, model.lm_head.weight
        self.cos, self.sin = _tables(decoder, self.embed, max_len)

    def forward(
        self, ids: Tensor, positions: Tensor, context: Context, keep: Tensor | None, seen: Seen | None = None
    ) -> Tensor:
        x = F.embedding(ids, self.embed)
        for w in self.layers:
            h = self._norm(x, w.norm_in)
            if isinstance(w.mixer, _Attention):
                self._attend(x, h, w.mixer, positions, context)
            else:
                x.add_(context.recur(call_of(w.mixer, h))[0])  # type: ignore[attr-defined]
            feed_forward(self.kernels, x, self._norm(x, w.norm_mlp), w.mlp, w.shared, context)
        if keep is not None:
            x = x.index_select(0, keep)
        return float_logits(self._norm(x, self.norm), self.head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.kernels.rms(x, weight, self.eps, 1.0)

    def _attend(self, x: Tensor, h: Tensor, w: _Attention, positions: Tensor, context: Context) -> None:
        heads, kv_heads, dim = w.heads
        tokens = len(h)
        made = F.linear(h, w.qkv)
        both, k, v = torch.split(made, [2 * heads * dim, kv_heads * dim, kv_heads * dim], 1)
        turn = self.cos, self.sin, positions, self.eps
        q = self.kernels.norm_rotate(both.view(tokens, heads, 2 * dim), 2 * dim, w.q_norm, 1.0, *turn)
        k = self.kernels.norm_rotate(k.view(tokens, kv_heads, dim), dim, w.k_norm, 1.0, *turn)
        out = context.attend(w.number, q, k, v.reshape(tokens, kv_heads, dim), AttentionForm(w.scale))
        gate = both.view(tokens, heads, 2 * dim)[..., dim:]
        x.addmm_((out * gate.sigmoid()).reshape(tokens, -1), w.out.t())

    @property
    def device_kernels(self) -> FusedKernels:
        return self.kernels


def _bind_attention(a: Any, number: int) -> _Attention:
    qkv, _ = join(a.q_proj, a.k_proj, a.v_proj)
    dim = a.head_dim
    heads = a.q_proj.out_features // (2 * dim), a.k_proj.out_features // dim, dim
    return _Attention(qkv, a.q_norm.weight, a.k_norm.weight, a.o_proj.weight, heads, a.scaling, number)


@torch.no_grad()
def _tables(decoder: Any, like: Tensor, max_len: int) -> tuple[Tensor, Tensor]:
    """cos and signed sin (max_len, turned): of the part of a head that is turned at all."""
    positions = torch.arange(max_len, device=like.device)[None]
    if hasattr(decoder.rotary_emb, "mrope_section"):  # of text its three axes are one
        positions = positions.expand(3, 1, -1)
    cos, sin = (table[0] for table in decoder.rotary_emb(like[:1], positions))
    sin = sin.clone()
    sin[:, : sin.shape[1] // 2].neg_()
    return cos.contiguous(), sin.contiguous()
