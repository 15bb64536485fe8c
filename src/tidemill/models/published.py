"""Published models in the words of their config.json, so that a layout can be judged before anything is downloaded.

Found by the name of the model or of its folder: `qwen2.5-32b`, `model.path: models/Qwen3-235B-A22B`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tidemill.models.shape import ModelShape, parse
from tidemill.recipe.config import ModelSettings


def _decoder(
    family: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    wide: int,
    vocabulary: int,
    window: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": family, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": wide, "vocab_size": vocabulary,
        "max_position_embeddings": window, **more,
    }  # fmt: skip


QWEN3_MOE = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
DEEPSEEK_V3 = _decoder(
    "deepseek_v3", 7168, 61, 128, 128, 18_432, 129_280, 163_840, n_routed_experts=256, num_experts_per_tok=8,
    moe_intermediate_size=2048, first_k_dense_replace=3, n_shared_experts=1, q_lora_rank=1536, kv_lora_rank=512,
    qk_rope_head_dim=64, v_head_dim=128,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "tiny": _decoder("llama", 64, 2, 8, 4, 96, 256, 256),
    "Qwen2.5-0.5B": _decoder("qwen2", 896, 24, 14, 2, 4864, 151_936, 32_768, tie_word_embeddings=True),
    "Qwen2.5-1.5B": _decoder("qwen2", 1536, 28, 12, 2, 8960, 151_936, 131_072, tie_word_embeddings=True),
    "Qwen2.5-7B": _decoder("qwen2", 3584, 28, 28, 4, 18_944, 152_064, 131_072),
    "Qwen2.5-32B": _decoder("qwen2", 5120, 64, 40, 8, 27_648, 152_064, 131_072),
    "Qwen2.5-72B": _decoder("qwen2", 8192, 80, 64, 8, 29_568, 152_064, 131_072),
    "Llama-3.1-8B": _decoder("llama", 4096, 32, 32, 8, 14_336, 128_256, 131_072),
    "Qwen3-32B": _decoder("qwen3", 5120, 64, 64, 8, 25_600, 151_936, 40_960, head_dim=128),
    "Qwen3-8B": _decoder("qwen3", 4096, 36, 32, 8, 12_288, 151_936, 40_960, head_dim=128),
    "Qwen3-30B-A3B": _decoder(
        "qwen3_moe", 2048, 48, 32, 4, 6144, 151_936, 40_960, **QWEN3_MOE, moe_intermediate_size=768
    ),
    "Qwen3-235B-A22B": _decoder(
        "qwen3_moe", 4096, 94, 64, 4, 12_288, 151_936, 40_960, **QWEN3_MOE, moe_intermediate_size=1536
    ),
    "DeepSeek-V3-671B": DEEPSEEK_V3,
    "DeepSeek-V3": DEEPSEEK_V3,
    "DeepSeek-R1": DEEPSEEK_V3,
}


def names() -> list[str]:
    return [name.lower() for name in MODELS]


def find(name: str) -> tuple[str, ModelShape] | None:
    """A published model's own name and shape, however its name is written."""
    for own, settings in MODELS.items():
        if own.lower() == name.lower().rsplit("/", 1)[-1]:
            shape = parse(settings)
            assert shape is not None
            return own, replace(shape, parameters=shape.total)
    return None


def shape_of(model: ModelSettings) -> ModelShape | None:
    """By the name of the model's folder, which need not be here."""
    found = find(Path(model.path).name) if model.path else None
    return found[1] if found else None
