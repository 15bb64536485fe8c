"""Names and cuts of Megatron-core's decoders: layers stacked along the first axis, queries, keys and values in one
matrix by groups of heads, gate and up one behind the other, a vocabulary that was padded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from tidemill.errors import ModelError
from tidemill.models.foreign.sharded import ShardedTensors

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
PREFIX = "decoder.layers."
ENDS = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
SAME = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
Parts = Iterator[tuple[str, Tensor]]


def is_one(names: Sequence[str]) -> bool:
    return any(name.removeprefix("model.").startswith(PREFIX) for name in names)


def tensors(found: ShardedTensors, config: Any) -> Parts:
    """Yield the tensors under the names that transformers has for this config."""
    if config.model_type not in FAMILIES:
        raise ModelError(
            f"{found.folder}: Megatron-core's form of {config.model_type} is not known",
            f"known: {', '.join(FAMILIES)}; others are written as a Hugging Face folder by Megatron's own bridge",
        )
    cuts: dict[str, Callable[[Tensor], list[tuple[str, Tensor]]]] = {
        "self_attention.linear_qkv.weight": partial(_qkv, config, "weight"),
        "self_attention.linear_qkv.bias": partial(_qkv, config, "bias"),
        "mlp.linear_fc1.weight": _gate_and_up,
    }
    for full in sorted(found.known):
        name = full.removeprefix("model.")
        if name.startswith(("optimizer.", "rng_state", "rerun_state")) or name.endswith("_extra_state"):
            continue
        if name in ENDS:
            yield from _end(ENDS[name], found.read(full), config)
            continue
        place = re.fullmatch(rf"{re.escape(PREFIX)}(?:(\d+)\.)?(\D.*)", name)
        if place is None or (place[2] not in SAME and place[2] not in cuts):
            raise ModelError(f"{found.folder}: {full} has no counterpart in {config.model_type}")
        stacked = found.read(full)
        layers = [(int(place[1]), stacked)] if place[1] else list(enumerate(stacked))
        for i, tensor in layers:
            parts = cuts[place[2]](tensor) if place[2] in cuts else [(SAME[place[2]], tensor)]
            yield from ((f"model.layers.{i}.{own}", part) for own, part in parts)


def _end(name: str, tensor: Tensor, config: Any) -> Parts:
    if name == "lm_head.weight" and config.tie_word_embeddings:
        return
    yield name, tensor if name == "model.norm.weight" else tensor[: config.vocab_size]


def _qkv(config: Any, kind: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    groups = config.num_key_value_heads or config.num_attention_heads
    each = config.num_attention_heads // groups
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if tensor.shape[0] != groups * (each + 2) * head:
        raise ModelError(
            f"linear_qkv has {tensor.shape[0]} rows; config.json says {groups} groups of {each} + 2 heads of {head}",
            "give the config.json of the model that was trained",
        )
    parts = tensor.view(groups, each + 2, head, *tensor.shape[1:])
    cut = {"q": parts[:, :each], "k": parts[:, each], "v": parts[:, each + 1]}
    return [(f"self_attn.{which}_proj.{kind}", part.reshape(-1, *tensor.shape[1:])) for which, part in cut.items()]


def _gate_and_up(tensor: Tensor) -> list[tuple[str, Tensor]]:
    gate, up = tensor.chunk(2)
    return [("mlp.gate_proj.weight", gate), ("mlp.up_proj.weight", up)]
