"""The forward pass of models with multi-head latent attention (DeepSeek-V3): the cache holds what keys and values are
made of, not the keys and values of every head.

A token keeps its latent (normed, `rank` numbers) and one rotary key that all heads share. The matrices that would make
a head's keys and values from the latent are absorbed: the first into the query, the second into what attention gives.
So attention runs over one key/value head, whose key is (latent, rotary key) and whose value is the latent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tidemill.models import families
from tidemill.models.attention.registry import AttentionForm, Context
from tidemill.models.layers import stages
from tidemill.models.mixture import routing
from tidemill.models.vision.eyes.eyes import Seen
from tidemill.rollout.native.forward import lean, mixture
from tidemill.rollout.native.forward.fused import FusedKernels, float_logits
from tidemill.rollout.native.forward.lean import Gated, LeanRunner, Weight
from tidemill.rollout.native.forward.mixture import Mixture
from tidemill.rollout.native.kernels.compiled import Kernels
from tidemill.rollout.native.ranks.links import Links


def supports(model: Any) -> bool:
    if type(model).__name__.removesuffix("ForCausalLM") not in families.latent_forms().values():
        return False
    layers = [layer for _, layer in stages.here(model)]
    return (
        model.config.hidden_act == "silu"
        and model.model.rotary_emb.rope_type in lean.STATIC_ROPE
        and all(type(m) is nn.Linear for layer in layers for m in layer.self_attn.children() if hasattr(m, "bias"))
        and all(mixture.is_known(layer.mlp) for layer in layers if mixture.is_mixture(layer.mlp))
        and not any(routing.has_foreign_hooks(m) for m in model.modules())
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    norm_in: Tensor
    q_down: tuple[Weight, Tensor] | None  # to the query's own latent, and its norm
    q: Weight
    kv_down: Weight
    kv_norm: Tensor
    k_up: Tensor  # (heads, nope, rank)
    v_up: Tensor  # (heads, v_dim, rank)
    o: Weight
    norm_mlp: Tensor
    mlp: Gated | Mixture


class LatentRunner(LeanRunner):
    layers: list[Any]

    def __init__(
        self,
        model: Any,
        max_len: int,
        kernels: Kernels | None = None,
        links: Links | None = None,
        eight: torch.dtype | None = None,
    ) -> None:
        self.model, self.kernels, self.links, self.eight = model, kernels, links, eight
        config, first = model.config, stages.here(model)[0][1].self_attn
        self.eps, self.scale = config.rms_norm_eps, first.scaling
        self.rank, self.nope, self.rope = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
        self.is_interleaved = bool(config.rope_interleave)
        self.small_eps = first.kv_a_layernorm.variance_epsilon  # the latents' norms have one of their own
        self.bind()
        self.cos, self.sin = _half_tables(model, max_len)

    def bind(self) -> None:
        self.layers = [_bind(layer, number, self) for layer, number in lean.numbered(self.model)]
        self._bind_ends()
        if self.eight is not None:
            self.layers = [lean.in_eight(layer, self.eight) for layer in self.layers]

    def _layer(self, i: int, w: _Layer, x: Tensor, positions: Tensor, context: Context) -> Tensor:  # type: ignore[override]
        x = self._add(x, self._attend(i, w, self._norm(x, w.norm_in), positions, context), *w.o)
        return self._feed_forward(x, self._norm(x, w.norm_mlp), w.mlp, context)

    def _attend(self, i: int, w: _Layer, h: Tensor, positions: Tensor, context: Context) -> Tensor:
        tokens, down = h.shape[0], h
        if w.q_down is not None:
            down = self._small_norm(self._linear(h, *w.q_down[0]), w.q_down[1])
        q = self._linear(down, *w.q).view(tokens, -1, self.nope + self.rope)
        kv = self._linear(h, *w.kv_down)
        latent = self._small_norm(kv[:, : self.rank].contiguous(), w.kv_norm).unsqueeze(1)
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        turned = self._turn(kv[:, self.rank :].unsqueeze(1), cos, sin)
        asks = torch.bmm(q[..., : self.nope].transpose(0, 1), w.k_up).transpose(0, 1)  # (tokens, heads, rank)
        query = torch.cat([asks, self._turn(q[..., self.nope :], cos, sin)], -1)
        a = context.attend(i, query, torch.cat([latent, turned], -1), latent, AttentionForm(self.scale))
        return torch.bmm(a.transpose(0, 1), w.v_up.transpose(1, 2)).transpose(0, 1).reshape(tokens, -1)

    def _small_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.small_eps)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (tokens, heads, rope) at its position. Interleaved: its numbers are pairs that lie side by side."""
        if self.is_interleaved:
            a, b = x[..., 0::2], x[..., 1::2]
        else:
            a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class FusedLatentRunner(LatentRunner):
    """The same for an accelerator: norms, gates and experts by its kernels, nothing that asks the host."""

    def __init__(self, model: Any, max_len: int, kernels: FusedKernels, eight: torch.dtype | None = None) -> None:
        self.fused = kernels
        super().__init__(model, max_len, eight=eight)

    @property
    def device_kernels(self) -> FusedKernels:
        return self.fused

    def forward(
        self, ids: Tensor, positions: Tensor, context: Context, keep: Tensor | None, seen: Seen | None = None
    ) -> Tensor:
        x = F.embedding(ids, self.embed)
        for i, layer in enumerate(self.layers):
            x = self._layer(i, layer, x, positions, context)
        if keep is not None:
            x = x.index_select(0, keep)
        return float_logits(self._norm(x, self.norm), self.head[0])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.fused.rms(x, weight, self.eps)

    def _small_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.fused.rms(x, weight, self.small_eps)

    def _feed_forward(self, x: Tensor, h: Tensor, w: Gated | Mixture, context: Context | None) -> Tensor:
        if not isinstance(w, Mixture):
            return super()._feed_forward(x, h, w, context)
        chosen, shares = mixture.choose(w, mixture.router_logits(w, h))
        mixture.record(w, context, chosen)
        if w.shared is not None:
            x = x + mixture.through_shared(w.shared, h)
        self.fused.add_experts(x, h, chosen.int(), shares, (w.module.gate_up_proj, w.module.down_proj))
        return x


def _bind(layer: Any, number: int, runner: LatentRunner) -> _Layer:
    a, m = layer.self_attn, layer.mlp
    heads = a.num_heads * len(a.kv_b_proj.weight) // a.kv_b_proj.out_features  # those that are here
    up = a.kv_b_proj.weight.view(heads, -1, runner.rank)
    direct = getattr(a, "q_proj", None)
    down = None if direct is not None else (_weight(a.q_a_proj), a.q_a_layernorm.weight)
    return _Layer(
        norm_in=layer.input_layernorm.weight,
        q_down=down,
        q=_weight(a.q_b_proj if direct is None else direct),
        kv_down=_weight(a.kv_a_proj_with_mqa),
        kv_norm=a.kv_a_layernorm.weight,
        k_up=up[:, : runner.nope],
        v_up=up[:, runner.nope :],
        o=_weight(a.o_proj),
        norm_mlp=layer.post_attention_layernorm.weight,
        mlp=mixture.bind(m, number) if mixture.is_mixture(m) else _gated(m),
    )


def _gated(m: Any) -> Gated:
    return Gated(_weight(m.gate_proj), _weight(m.up_proj), _weight(m.down_proj))


def _weight(linear: Any) -> Weight:
    return linear.weight, linear.bias


def _half_tables(model: Any, max_len: int) -> tuple[Tensor, Tensor]:
    """cos and sin (max_len, 1, rope / 2): a pair of numbers has one angle."""
    like = next(model.model.parameters()).new_empty(1, model.config.hidden_size)
    with torch.no_grad():
        cos, sin = model.model.rotary_emb(like, torch.arange(max_len, device=like.device).unsqueeze(0))
    half = cos.shape[-1] // 2
    return cos[0, :, :half].unsqueeze(1).contiguous(), sin[0, :, :half].unsqueeze(1).contiguous()
