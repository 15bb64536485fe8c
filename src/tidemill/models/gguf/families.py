"""What the settings in a GGUF file are in transformers' words, one function per family.

llama.cpp keeps some facts in its own code instead of in the file; where that is so, a comment says which.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tidemill.errors import ModelError
from tidemill.models.gguf.file import Opened

Settings = dict[str, Any]
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_WINDOW = 1.0, 4.0, 8192  # what all Llama 3.x have; the file has only their effect
PLAIN_ROPE = ("none", None)


@dataclass(frozen=True, slots=True)
class Family:
    model_type: str
    settings: Callable[[Opened], Settings]
    turns_heads: bool = False  # queries and keys are stored with the two halves of a head interleaved
    norms_less_one: bool = False  # the module adds 1 to its norms' weights, which the file already has
    has_four_norms: bool = False  # norms before and after each branch


def family_of(opened: Opened) -> Family:
    name = opened.architecture
    if name not in FAMILIES:
        raise ModelError(
            f"{opened.path} is of the architecture {name!r}, which cannot be imported",
            f"{', '.join(FAMILIES)} can; other models come as Hugging Face folders: model.path=org/name",
        )
    if name == "llama":
        return _llama_or_mistral(opened)
    return FAMILIES[name]


def _llama_or_mistral(opened: Opened) -> Family:
    """Tell Mistral from Llama by the model's name: its files call themselves llama, and the weights are alike."""
    if opened.setting("expert_count"):
        raise ModelError(f"{opened.path} is a mixture of the Mixtral kind", "take it as a Hugging Face folder")
    said = " ".join(str(opened.metadata.get(f"general.{key}", "")) for key in ("name", "basename", "organization"))
    return MISTRAL if "mistral" in said.lower() else FAMILIES["llama"]


def _common(opened: Opened) -> Settings:
    heads, hidden = _number(opened, "attention.head_count"), _number(opened, "embedding_length")
    head_dim = int(opened.setting("attention.key_length") or hidden // heads)
    if int(opened.setting("attention.value_length") or head_dim) != head_dim:
        raise ModelError(f"{opened.path}: values are not as wide as keys", "take it as a Hugging Face folder")
    return {
        "vocab_size": opened.shape("token_embd.weight")[0],
        "hidden_size": hidden,
        "num_hidden_layers": _number(opened, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _number(opened, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": _number(opened, "feed_forward_length"),
        "max_position_embeddings": _number(opened, "context_length"),
        "rms_norm_eps": float(opened.need("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in opened.stored,
        "rope_parameters": _rope(opened, head_dim),
    }


def _number(opened: Opened, key: str, otherwise: int | None = None) -> int:
    value = opened.need(key) if otherwise is None else opened.setting(key, otherwise)
    if isinstance(value, list):
        if len(set(value)) > 1:
            raise ModelError(
                f"{opened.path}: {opened.architecture}.{key} differs from layer to layer",
                "take the model as a Hugging Face folder",
            )
        value = value[0]
    return int(value)


# Rotary positions


def _rope(opened: Opened, head_dim: int) -> Settings:
    theta = float(opened.setting("rope.freq_base", 10_000.0))
    kind = opened.setting("rope.scaling.type")
    if "rope_freqs.weight" in opened.stored:
        return _llama3_rope(opened, theta, head_dim)
    if "rope_factors_long.weight" in opened.stored:
        return _long_rope(opened, theta)
    if kind in PLAIN_ROPE:
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise ModelError(
            f"{opened.path}: rotary scaling {kind!r} is not known", "take the model as a Hugging Face folder"
        )
    found: Settings = {"rope_type": kind, "rope_theta": theta, "factor": float(opened.need("rope.scaling.factor"))}
    before = opened.setting("rope.scaling.original_context_length")
    return found | ({"original_max_position_embeddings": int(before)} if kind == "yarn" and before else {})


def _llama3_rope(opened: Opened, theta: float, head_dim: int) -> Settings:
    """Take Llama 3's settings where they give the divisors of each frequency that the file has, and refuse others."""
    stored = opened.tensor("rope_freqs.weight").reshape(-1)
    factor = float(stored.max())
    if factor == 1.0:
        return {"rope_type": "default", "rope_theta": theta}
    if not np.allclose(stored, llama3_divisors(theta, head_dim, factor), rtol=1e-4):
        raise ModelError(
            f"{opened.path}: its rotary frequencies are not scaled as Llama 3's are",
            "take the model as a Hugging Face folder",
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_WINDOW,
    }


def llama3_divisors(theta: float, head_dim: int, factor: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Divide long waves by the factor, leave short ones, blend those between."""
    waves = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = np.clip((LLAMA3_WINDOW / waves - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0, 1)
    return np.asarray(1 / ((1 - blend) / factor + blend))


def _long_rope(opened: Opened, theta: float) -> Settings:
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "long_factor": opened.tensor("rope_factors_long.weight").reshape(-1).tolist(),
        "short_factor": opened.tensor("rope_factors_short.weight").reshape(-1).tolist(),
        "original_max_position_embeddings": int(opened.need("rope.scaling.original_context_length")),
    }


# Families


def _llama(opened: Opened) -> Settings:
    biases = {"attention_bias": "blk.0.attn_q.bias" in opened.stored, "mlp_bias": "blk.0.ffn_up.bias" in opened.stored}
    return _common(opened) | biases


def _mistral(opened: Opened) -> Settings:
    return _common(opened) | {"sliding_window": _window(opened)}


def _qwen2(opened: Opened) -> Settings:
    found = _common(opened)
    found.pop("head_dim")  # its config has none: hidden size by heads
    return found


def _qwen3(opened: Opened) -> Settings:
    return _common(opened) | {"attention_bias": "blk.0.attn_q.bias" in opened.stored}


def _qwen3_moe(opened: Opened) -> Settings:
    return _qwen3(opened) | {
        "num_experts": _number(opened, "expert_count"),
        "num_experts_per_tok": _number(opened, "expert_used_count"),
        "moe_intermediate_size": _number(opened, "expert_feed_forward_length"),
        "norm_topk_prob": True,  # in llama.cpp's code, not in the file
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma(opened: Opened) -> Settings:
    return _common(opened) | {"hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(opened: Opened) -> Settings:
    return _gemma(opened) | {
        "query_pre_attn_scalar": _query_scalar(opened, layers_of_27b=46),
        "attn_logit_softcapping": float(opened.setting("attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": float(opened.setting("final_logit_softcapping", 30.0)),
        "sliding_window": _window(opened) or 4096,
    }


def _gemma3(opened: Opened) -> Settings:
    found = _gemma(opened)
    near = {"rope_type": "default", "rope_theta": float(opened.setting("rope.freq_base_swa", 10_000.0))}
    return found | {
        "query_pre_attn_scalar": _query_scalar(opened, layers_of_27b=62),
        "final_logit_softcapping": opened.setting("final_logit_softcapping"),
        "sliding_window": _window(opened) or 1024,
        "rope_parameters": {"full_attention": found["rope_parameters"], "sliding_attention": near},
    }


def _query_scalar(opened: Opened, layers_of_27b: int) -> int:
    """Follow llama.cpp's code, since no file says it: a head's width, in the 27B models the hidden size by heads."""
    heads = _number(opened, "attention.head_count")
    by_heads = _number(opened, "embedding_length") // heads
    if _number(opened, "block_count") == layers_of_27b:
        return by_heads
    return int(opened.setting("attention.key_length") or by_heads)


def _phi3(opened: Opened) -> Settings:
    found = _common(opened)
    turned = _number(opened, "rope.dimension_count", found["head_dim"])
    found["rope_parameters"]["partial_rotary_factor"] = turned / found.pop("head_dim")
    before = opened.setting("rope.scaling.original_context_length", found["max_position_embeddings"])
    return found | {"sliding_window": _window(opened), "original_max_position_embeddings": int(before)}


def _window(opened: Opened) -> int | None:
    return int(opened.setting("attention.sliding_window") or 0) or None


MISTRAL = Family("mistral", _mistral, turns_heads=True)
FAMILIES = {
    "llama": Family("llama", _llama, turns_heads=True),
    "qwen2": Family("qwen2", _qwen2),
    "qwen3": Family("qwen3", _qwen3),
    "qwen3moe": Family("qwen3_moe", _qwen3_moe),
    "gemma": Family("gemma", _gemma, norms_less_one=True),
    "gemma2": Family("gemma2", _gemma2, norms_less_one=True, has_four_norms=True),
    "gemma3": Family("gemma3_text", _gemma3, norms_less_one=True, has_four_norms=True),
    "phi3": Family("phi3", _phi3),
}
