"""Tensors of a GGUF file under the names and in the order that a Hugging Face folder has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from tidemill.errors import ModelError
from tidemill.models.gguf.families import Family
from tidemill.models.gguf.file import Opened

Array = np.ndarray[Any, np.dtype[np.float32]]
SETTINGS_ONLY = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def converted(opened: Opened, family: Family, settings: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    """Yield each tensor by its name in the folder; a layer's stacked experts one by one."""
    names = INSIDE | (FOUR_NORMS if family.has_four_norms else {})
    if family.model_type == "phi3":
        names = names | {"ffn_up": "mlp.gate_up_proj"}  # gate and up in one matrix, under the name of one of them
    for stored in opened.stored:
        if stored in SETTINGS_ONLY:
            continue
        layer = LAYER.fullmatch(stored)
        if layer is not None and layer[2] in EXPERTS:
            for expert, matrix in enumerate(opened.tensor(stored)):
                yield f"model.layers.{layer[1]}.mlp.experts.{expert}.{EXPERTS[layer[2]]}.{layer[3]}", matrix
            continue
        yield _name(opened, stored, layer, names), _values(opened, stored, family, settings)


def _name(opened: Opened, stored: str, layer: re.Match[str] | None, names: dict[str, str]) -> str:
    outside, _, kind = stored.rpartition(".")
    if layer is None and outside in OUTSIDE:
        return f"{OUTSIDE[outside]}.{kind}"
    if layer is not None and layer[2] in names:
        return f"model.layers.{layer[1]}.{names[layer[2]]}.{layer[3]}"
    raise ModelError(
        f"{opened.path} has a tensor {stored} that {opened.architecture} models have no place for",
        "take the model as a Hugging Face folder",
    )


def _values(opened: Opened, stored: str, family: Family, settings: dict[str, Any]) -> Array:
    values = opened.tensor(stored)
    if family.norms_less_one and stored.endswith("norm.weight"):
        return values - np.float32(1)
    if family.turns_heads and ".attn_q." in stored:
        return _halves_apart(values, settings["num_attention_heads"])
    if family.turns_heads and ".attn_k." in stored:
        return _halves_apart(values, settings["num_key_value_heads"])
    return values


def _halves_apart(values: Array, heads: int) -> Array:
    """Reorder a head's rows: the file has pairs that are turned together, transformers the first of all pairs, then
    the second of all."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])  # (heads, dim / 2, 2, …)
    return pairs.swapaxes(1, 2).reshape(values.shape)
