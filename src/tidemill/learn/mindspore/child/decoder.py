"""Llama, Qwen2 and Qwen3 decoders in MindSpore over packed rows, in float32, with Hugging Face's parameter names."""

# mypy: disable-error-code="assignment,misc"
# MindSpore has no types that can be read here, and its graphs are compiled from what stands in `construct`.
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

HIDDEN = -1e30  # a score of what is not seen; no infinity, because a row of padding sees nothing at all


@dataclass(frozen=True)
class Form:
    """What a config says of the architecture."""

    layers: int
    heads: int
    kv_heads: int
    dim: int  # of a head
    eps: float
    has_bias: bool  # of queries, keys and values
    has_out_bias: bool
    has_norms: bool  # of queries and keys
    is_tied: bool
    padding: int  # the token whose embedding is not learned as an input; -1: none
    temperature: float
    chunk: int  # targets whose logits exist at once
    recompute: bool


def norm(x: Any, weight: Any, eps: float) -> Any:
    return x * ops.rsqrt(ops.mean(x * x, -1, True) + eps) * weight


def product(x: Any, weight: Any) -> Any:
    return ops.matmul(x, weight.T)


def turned(x: Any, cos: Any, sin: Any, half: int) -> Any:
    """x (tokens, heads, dim), at positions whose cos and sin (tokens, 1, dim) are given."""
    a, b = ops.split(x, half, -1)
    return x * cos + ops.cat((-b, a), -1) * sin


class Layer(nn.Cell):
    def __init__(self, form: Form, number: int, given: dict[str, Any]) -> None:
        super().__init__()
        self.form = form
        self.names: list[tuple[Parameter, str]] = []

        def own(name: str) -> Parameter:
            full = f"model.layers.{number}.{name}"
            made = Parameter(Tensor(given[full]), name=full)
            self.names.append((made, full))
            return made

        self.norm_in, self.norm_mlp = own("input_layernorm.weight"), own("post_attention_layernorm.weight")
        self.q, self.k = own("self_attn.q_proj.weight"), own("self_attn.k_proj.weight")
        self.v, self.o = own("self_attn.v_proj.weight"), own("self_attn.o_proj.weight")
        self.gate, self.up = own("mlp.gate_proj.weight"), own("mlp.up_proj.weight")
        self.down = own("mlp.down_proj.weight")
        if form.has_bias:
            self.q_bias, self.k_bias = own("self_attn.q_proj.bias"), own("self_attn.k_proj.bias")
            self.v_bias = own("self_attn.v_proj.bias")
        if form.has_out_bias:
            self.o_bias = own("self_attn.o_proj.bias")
        if form.has_norms:
            self.q_norm, self.k_norm = own("self_attn.q_norm.weight"), own("self_attn.k_norm.weight")

    def construct(self, x: Any, cos: Any, sin: Any, tables: Any, masks: Any, back: Any) -> Any:
        form = self.form
        h = norm(x, self.norm_in, form.eps)
        q, k, v = product(h, self.q), product(h, self.k), product(h, self.v)
        if form.has_bias:
            q, k, v = q + self.q_bias, k + self.k_bias, v + self.v_bias
        q, k = q.reshape(-1, form.heads, form.dim), k.reshape(-1, form.kv_heads, form.dim)
        v = v.reshape(-1, form.kv_heads, form.dim)
        if form.has_norms:
            q, k = norm(q, self.q_norm, form.eps), norm(k, self.k_norm, form.eps)
        q, k = turned(q, cos, sin, form.dim // 2), turned(k, cos, sin, form.dim // 2)
        seen = product(self.attend(q, k, v, tables, masks, back), self.o)
        if form.has_out_bias:
            seen = seen + self.o_bias
        x = x + seen
        h = norm(x, self.norm_mlp, form.eps)
        return x + product(ops.silu(product(h, self.gate)) * product(h, self.up), self.down)

    def attend(self, q: Any, k: Any, v: Any, tables: Any, masks: Any, back: Any) -> Any:
        """q, k, v (tokens, heads, dim); each table gathers its rows, and `back` brings them to the packed order."""
        form, parts = self.form, ()
        for (queries, keys), mask in zip(tables, masks):
            rows, many = queries.shape
            other = keys.shape[1]
            asks = ops.gather(q, queries.reshape(-1), 0).reshape(rows, many, form.heads, form.dim)
            held = ops.gather(k, keys.reshape(-1), 0).reshape(rows, other, form.kv_heads, form.dim)
            told = ops.gather(v, keys.reshape(-1), 0).reshape(rows, other, form.kv_heads, form.dim)
            asks, held, told = asks.transpose(0, 2, 1, 3), held.transpose(0, 2, 1, 3), told.transpose(0, 2, 1, 3)
            out = self.attention(asks, held, told, mask)
            parts = (*parts, out.transpose(0, 2, 1, 3).reshape(rows * many, form.heads * form.dim))
        whole = parts[0] if len(parts) == 1 else ops.cat(parts, 0)
        return ops.gather(whole, back, 0)

    def attention(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        """q (rows, heads, queries, dim); query heads in groups, as one product with the key head that they share."""
        form = self.form
        rows, heads, many, dim = q.shape
        other = k.shape[2]
        grouped = q.reshape(rows, form.kv_heads, heads // form.kv_heads * many, dim)
        scores = ops.matmul(grouped, k.transpose(0, 1, 3, 2)).reshape(rows, heads, many, other)
        weights = ops.softmax(scores * (form.dim**-0.5) + mask, -1)
        out = ops.matmul(weights.reshape(rows, form.kv_heads, heads // form.kv_heads * many, other), v)
        return out.reshape(rows, heads, many, dim)


class Decoder(nn.Cell):
    """Packed tokens → log-probability and entropy of every target."""

    def __init__(self, form: Form, given: dict[str, Any], cos: Any, sin: Any) -> None:
        super().__init__()
        self.form = form
        self.embed = Parameter(Tensor(given["model.embed_tokens.weight"]), name="model.embed_tokens.weight")
        self.norm = Parameter(Tensor(given["model.norm.weight"]), name="model.norm.weight")
        self.layers = nn.CellList([Layer(form, i, given) for i in range(form.layers)])
        for layer in self.layers:  # a list renames what is in it
            for parameter, name in layer.names:
                parameter.name = name
        if not form.is_tied:
            self.head = Parameter(Tensor(given["lm_head.weight"]), name="lm_head.weight")
        if form.recompute:
            for layer in self.layers:
                layer.recompute()
        self.cos, self.sin = Tensor(cos), Tensor(sin)

    def construct(self, tokens: Any, positions: Any, predicts: Any, targets: Any, back: Any, *tables: Any) -> Any:
        """`tables`: queries and keys of each, one after the other."""
        x = ops.gather(self.embed, tokens, 0)
        if self.form.padding >= 0:
            x = ops.select((tokens == self.form.padding).expand_dims(1).broadcast_to(x.shape), ops.stop_gradient(x), x)
        cos = ops.gather(self.cos, positions, 0).expand_dims(1)
        sin = ops.gather(self.sin, positions, 0).expand_dims(1)
        placed, masks = (), ()
        for i in range(0, len(tables), 2):
            queries, keys = tables[i], tables[i + 1]
            masks = (*masks, self.mask(queries, keys, positions))
            placed = (*placed, (ops.relu(queries), ops.relu(keys)))  # what is not there reads the first token
        for layer in self.layers:
            x = layer(x, cos, sin, placed, masks, back)
        hidden = ops.gather(norm(x, self.norm, self.form.eps), predicts, 0)
        head = self.embed if self.form.is_tied else self.head
        count, chunk = targets.shape[0], self.form.chunk
        logprobs, entropies = (), ()
        for start in range(0, count, chunk):
            logprob, entropy = self.score(hidden[start : start + chunk], head, targets[start : start + chunk])
            logprobs, entropies = (*logprobs, logprob), (*entropies, entropy)
        if len(logprobs) == 1:
            return logprobs[0], entropies[0]
        return ops.cat(logprobs, 0), ops.cat(entropies, 0)

    def mask(self, queries: Any, keys: Any, positions: Any) -> Any:
        """(rows, 1, queries, keys), to be added to scores: by position, because a row is one sequence."""
        at = ops.gather(positions, ops.relu(queries).reshape(-1), 0).reshape(queries.shape).expand_dims(-1)
        of = ops.gather(positions, ops.relu(keys).reshape(-1), 0).reshape(keys.shape).expand_dims(1)
        is_seen = ops.logical_and(of <= at, (keys >= 0).expand_dims(1))
        hidden = ops.full(is_seen.shape, HIDDEN, dtype=ms.float32)
        return ops.select(is_seen, ops.zeros_like(hidden), hidden).expand_dims(1)

    def score(self, hidden: Any, head: Any, targets: Any) -> Any:
        logits = product(hidden, head) / self.form.temperature
        total = ops.logsumexp(logits, -1)
        chosen = ops.gather_elements(logits, 1, targets.expand_dims(1)).reshape(-1)
        share = ops.exp(logits - total.expand_dims(-1))
        return chosen - total, total - (share * logits).sum(-1)


def rotary(cos: Any, sin: Any) -> tuple[Any, Any]:
    return np.ascontiguousarray(cos, np.float32), np.ascontiguousarray(sin, np.float32)
