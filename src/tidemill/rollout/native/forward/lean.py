"""The Llama family's forward pass with few operations, over the Hugging Face module's own parameters.

On a small model most of a decode step is the cost of launching operations: this makes about twenty per layer where the
module makes about sixty. Parameters are read where they are, so the learner's in-place updates need no copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tidemill.models import families
from tidemill.models.attention.registry import AttentionForm, Context, attention_window
from tidemill.models.layers import rowwise, stages
from tidemill.models.layers.eight import EightWeight, rounded
from tidemill.models.mixture import routing
from tidemill.models.parts import decoder_of
from tidemill.models.vision.eyes import eyes
from tidemill.models.vision.eyes.eyes import Seen
from tidemill.reshard.layouts.layout import Shard
from tidemill.rollout.native.forward import mixture
from tidemill.rollout.native.forward.mixture import Mixture
from tidemill.rollout.native.kernels.compiled import Kernels
from tidemill.rollout.native.ranks import share
from tidemill.rollout.native.ranks.experts import SpreadExperts, names_of
from tidemill.rollout.native.ranks.links import Links

# A large weight with few rows is read once and never rearranged by our own product; the library's takes up to twice as
# long (60 M parameters, one thread: 41 ms against 24 for 2 rows, 35 against 27 for 4, 39 against 38 for 8).
FEW_ROWS, LARGE_WEIGHT = 6, 1 << 16
# Rotary tables that depend on nothing but the position; "dynamic" and "longrope" look at the sequence's length.
STATIC_ROPE = ("default", "linear", "llama3", "yarn")


def supports(model: Any) -> bool:
    """Whether its layers are: norm, attention with rotary positions, norm, gated SiLU or a router and experts."""
    decoder = decoder_of(model)
    if not _has_form(model):
        return False
    return (
        model.config.get_text_config().hidden_act == "silu"
        and decoder.rotary_emb.rope_type in STATIC_ROPE
        and all(type(m) is nn.Linear for _, layer in stages.here(model) for m in _linears(layer))
        and all(mixture.is_known(mlp) for mlp in _mixtures(model))
        and not any(routing.has_foreign_hooks(m) for m in (*decoder.modules(), model.get_output_embeddings()))
    )


def _has_form(model: Any) -> bool:
    """Whether its layers are of a family that is known, with nothing between them and the output layer but a norm."""
    kind = type(model).__name__.removesuffix("ForCausalLM") if eyes.of(model) is None else None
    form = type(stages.here(model)[0][1]).__name__.removesuffix("DecoderLayer")
    return kind in (None, form) and form in families.llama_forms(mixtures=True).values()


def _linears(layer: Any) -> tuple[Any, ...]:
    a, m = layer.self_attn, layer.mlp
    if mixture.is_mixture(m):
        m = mixture.shared_of(m)
    gated = () if m is None else (m.gate_proj, m.up_proj, m.down_proj)
    return a.q_proj, a.k_proj, a.v_proj, a.o_proj, *gated


def _mixtures(model: Any) -> list[Any]:
    return [layer.mlp for _, layer in stages.here(model) if mixture.is_mixture(layer.mlp)]


def numbered(model: Any) -> list[tuple[Any, int]]:
    """Every layer that is here, and how many before it have experts: recorded routes count those alone."""
    number, found = 0, []
    for _, layer in stages.here(model):
        found.append((layer, number))
        number += mixture.is_mixture(layer.mlp)
    return found


Weight = tuple[Tensor | EightWeight, Tensor | None]  # and bias
ELSEWHERE = torch.empty(0)  # in the place of what another stage has


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
    sinks: Tensor | None


class LeanRunner:
    """`links`: of a rank that holds its share of the model alone, to the others of its engine. `eight`: the products of
    attention and dense MLPs are of this 8-bit type."""

    def __init__(
        self,
        model: Any,
        max_len: int,
        kernels: Kernels | None = None,
        links: Links | None = None,
        eight: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.kernels = kernels
        self.links = links
        self.eight = eight
        config = model.config.get_text_config()
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.eps = config.rms_norm_eps
        self.scale = stages.here(model)[0][1].self_attn.scaling
        self.bind()
        self.cos, self.sin = rotary_tables(model, self.dim, max_len)
        self.turns = self.cos, self.sin

    def bind(self) -> None:
        """Look the parameters up again: only needed when they were replaced, not when they were changed in place."""
        self.layers = [_bind(layer, number) for layer, number in numbered(self.model)]
        self._bind_ends()
        if self.eight is not None:
            self.layers = [in_eight(layer, self.eight) for layer in self.layers]

    def refresh(self) -> None:
        """Make 8-bit weights again from the parameters."""
        for weight in eight_weights(self.layers):
            weight.refresh()

    def _bind_ends(self) -> None:
        """What lies before and behind the layers; of a stage of several, some of it."""
        body, output = decoder_of(self.model), self.model.get_output_embeddings()
        self.first_layer = stages.here(self.model)[0][0]
        self.embed: Tensor = getattr(body.embed_tokens, "weight", ELSEWHERE)
        self.norm: Tensor = getattr(body.norm, "weight", ELSEWHERE)
        self.head: tuple[Tensor, Tensor | None] = getattr(output, "weight", ELSEWHERE), getattr(output, "bias", None)
        self.spread: dict[str, SpreadExperts] = {}
        if self.links is not None:
            self.layers, self.spread = over_ranks(self.model, self.layers, self.links)
            self.head = own_words(self.head, self.model, self.links)

    def forward(
        self, ids: Tensor, positions: Tensor, context: Context, keep: Tensor | None, seen: Seen | None = None
    ) -> Tensor:
        x = self._begin(ids, seen)
        self.turns, positions = turns_at(self.model, (self.cos, self.sin), positions)
        for i, layer in enumerate(self.layers, self.first_layer):
            x = self._layer(i, layer, x, positions, context)
            add_deep(x, i, seen)
        if self.links is not None and not self.links.is_last:
            self.links.send(x)
            return x.new_empty(len(x) if keep is None else len(keep), 0)
        if keep is not None:
            x = x.index_select(0, keep)
        logits = self._linear(self._norm(x, self.norm), *self.head)
        return logits if self.links is None else self.links.join_words(logits, share.of(self.model).vocabulary)

    def _begin(self, ids: Tensor, seen: Seen | None) -> Tensor:
        if self.links is not None:
            self.links.enter(True)
            if not self.links.is_first:
                like = self.layers[0].norm_in
                return self.links.receive(like.new_empty(len(ids), len(like)))
        return embedded(ids, self.embed, seen)

    def stand_by(self) -> None:
        """Take part in a step for which this replica has no tokens: others' may have chosen experts that are here."""
        if self.links is not None and self.links.crosses and self.links.enter(False):
            for layer in self.layers:
                if isinstance(layer.mlp, Mixture):
                    self._feed_forward(*(layer.norm_in.new_empty(0, len(layer.norm_in)),) * 2, layer.mlp, None)

    def _layer(self, i: int, w: _Layer, x: Tensor, positions: Tensor, context: Context) -> Tensor:
        tokens = x.shape[0]
        h = self._once(self._norm(x, w.norm_in), w.q)
        q = self._linear(h, *w.q).view(tokens, -1, self.dim)
        k = self._linear(h, *w.k).view(tokens, -1, self.dim)
        v = self._linear(h, *w.v).view(tokens, -1, self.dim)
        q, k = self._rotate(q, w.q_norm, positions), self._rotate(k, w.k_norm, positions)
        a = context.attend(i, q, k, v, AttentionForm(self.scale, w.window, sinks=w.sinks)).reshape(tokens, -1)
        x = self._add(x, a, *w.o)
        return self._feed_forward(x, self._norm(x, w.norm_mlp), w.mlp, context)

    def _feed_forward(self, x: Tensor, h: Tensor, w: Gated | Mixture, context: Context | None) -> Tensor:
        if isinstance(w, Mixture):
            return self._sum(mixture.forward(w, h, context)).add_(x)
        h = self._once(h, w.gate)
        h = self._gate(self._linear(h, *w.gate), self._linear(h, *w.up))
        return self._add(x, h, *w.down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.kernels is not None:
            return self.kernels.rms(x, weight, self.eps)
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def _rotate(self, x: Tensor, norm: Tensor | None, positions: Tensor) -> Tensor:
        """x (tokens, heads, dim) normed and turned to its position; may work in place."""
        if self.kernels is not None:
            self.kernels.rotate(x, norm, *self.turns, positions, self.eps)
            return x
        if norm is not None:
            x = F.rms_norm(x, norm.shape, norm, self.eps)
        cos, sin = (table.index_select(0, positions) for table in self.turns)
        return (x * cos).addcmul_(x.roll(self.dim // 2, -1), sin)

    def _once(self, x: Tensor, w: Weight) -> Any:
        """The input of several products like this one, rounded once if they are of 8 bits."""
        return rounded(x, w[0].code.dtype) if isinstance(w[0], EightWeight) else x

    def _linear(self, x: Any, weight: Tensor | EightWeight, bias: Tensor | None) -> Tensor:
        if isinstance(weight, EightWeight):
            return weight.multiply(x, bias)
        if self._is_few(x, weight):
            return rowwise.linear(x, weight, bias)
        return F.linear(x, weight, bias)

    def _is_few(self, x: Tensor, weight: Tensor) -> bool:
        return self.kernels is not None and x.shape[0] <= FEW_ROWS and weight.numel() >= LARGE_WEIGHT

    def _add(self, residual: Tensor, x: Tensor, weight: Tensor | EightWeight, bias: Tensor | None) -> Tensor:
        if isinstance(weight, EightWeight) or (self.links is not None and self.links.grid.tp > 1):
            return self._sum(self._linear(x, weight, bias)).add_(residual)
        if self._is_few(x, weight):
            return rowwise.linear(x, weight, bias).add_(residual)
        out = torch.addmm(residual, x, weight.t())
        return out if bias is None else out.add_(bias)

    def _sum(self, x: Tensor) -> Tensor:
        return x if self.links is None else self.links.sum(x)

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
        sinks=getattr(a, "sinks", None),
    )  # fmt: skip


# Weights of a layer that are worth 8 bits: the absorbed ones, norms, routers and experts' stacks stay as they are.
EIGHT = ("q", "k", "v", "o", "gate", "up", "down", "kv_down", "mlp")


def in_eight(layer: Any, dtype: torch.dtype) -> Any:
    """A layer, or its MLP, with 8-bit weights."""

    def made(value: Any) -> Any:
        if isinstance(value, Gated):
            return in_eight(value, dtype)
        is_weight = isinstance(value, tuple) and isinstance(value[0], Tensor)
        return (EightWeight([value[0]], dtype), value[1]) if is_weight else value

    return replace(layer, **{name: made(getattr(layer, name)) for name in EIGHT if hasattr(layer, name)})


def eight_weights(layers: Iterable[Any]) -> Iterator[EightWeight]:
    for layer in layers:
        for value in (getattr(layer, field.name) for field in fields(layer)):
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, EightWeight):
                    yield one
                elif is_dataclass(one) and hasattr(one, "down"):
                    yield from eight_weights([one])


def over_ranks(model: Any, layers: list[Any], links: Links) -> tuple[list[Any], dict[str, SpreadExperts]]:
    """Layers whose experts lie on several ranks, and those by the names of their modules."""
    where = names_of(model, (layer.mlp.module for layer in layers if isinstance(layer.mlp, Mixture)))
    slots, spread = share.of(model).slots, {}
    for i, layer in enumerate(layers):
        if isinstance(layer.mlp, Mixture):
            name, gate = where[id(layer.mlp.module)], layer.mlp.gate.weight
            spread[name] = SpreadExperts(links, len(gate), slots[name], gate.device)
            layers[i] = replace(layer, mlp=replace(layer.mlp, over=spread[name]))
    return layers, spread


def own_words(head: tuple[Tensor, Tensor | None], model: Any, links: Links) -> tuple[Tensor, Tensor | None]:
    """This rank's rows of an output layer that is the embedding, which every rank has whole."""
    weight, bias = head
    if weight is ELSEWHERE or links.grid.tp == 1 or len(weight) < share.of(model).vocabulary:
        return head
    low, high = Shard(0).cut(0, len(weight), links.at.tp, links.grid.tp)
    return weight[low:high], None if bias is None else bias[low:high]


def rotary_tables(model: Any, dim: int, max_len: int) -> tuple[Tensor, Tensor]:
    """cos and signed sin, (max_len, 1, dim): rotated(x) = x * cos + swap_halves(x) * sin. In the model's own dtype, as
    its module would use them."""
    decoder = decoder_of(model)
    like = next(decoder.parameters())
    like = like.new_empty(1, decoder.config.hidden_size)
    with torch.no_grad():
        positions = torch.arange(max_len, device=like.device).unsqueeze(0)
        looks = eyes.of(model)
        if looks is not None and looks.has_axes:
            positions = positions.expand(eyes.AXES - 1, 1, -1)
        cos, sin = decoder.rotary_emb(like, positions)
    return _signed(cos, sin, dim)


def _signed(cos: Tensor, sin: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(1, tokens, dim) as the module gives them → (tokens, 1, dim), the first half of the sines negative. Some modules
    give a half, which holds for both."""
    if cos.shape[-1] < dim:
        cos, sin = (torch.cat([half, half], -1) for half in (cos, sin))
    sin = sin[0].clone()
    sin[:, : sin.shape[1] // 2].neg_()
    return cos[0].unsqueeze(1).contiguous(), sin.unsqueeze(1).contiguous()


def turns_at(model: Any, tables: tuple[Tensor, Tensor], positions: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Tables of cos and sin, and each token's row in them. Where tokens turn by time, height and width at once, a row
    is made for each."""
    if positions.ndim == 1:
        return tables, positions
    decoder = decoder_of(model)
    cos, sin = decoder.rotary_emb(decoder.embed_tokens.weight[:1], positions[1:, None])
    return _signed(cos, sin, tables[0].shape[-1]), torch.arange(positions.shape[1], device=positions.device)


def embedded(ids: Tensor, words: Tensor, seen: Seen | None) -> Tensor:
    """(tokens, width), with features in the places of an image's tokens."""
    x = F.embedding(ids, words)
    return x if seen is None else x.index_copy_(0, seen.at, seen.rows.to(x.dtype))


def add_deep(x: Tensor, layer: int, seen: Seen | None) -> None:
    """Behind a layer, in place: what the tower says to it directly."""
    if seen is not None and seen.deep is not None and layer < len(seen.deep):
        x.index_add_(0, seen.at, seen.deep[layer].to(x.dtype))
