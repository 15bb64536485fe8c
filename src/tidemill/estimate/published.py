"""Sizes of published models from their config.json files, so that a layout can be judged before anything is downloaded.

Found by the name of the model's folder: `model.path: models/Qwen3-235B-A22B`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tidemill.check.parallel import Cuttable
from tidemill.estimate.ranks_memory import Sizes
from tidemill.estimate.run import Shape
from tidemill.models.box.find import look
from tidemill.recipe.config import ModelSettings

QWEN3_235B = {
    "hidden": 4096, "layers": 94, "heads": 64, "kv_heads": 4, "head_dim": 128, "experts": 128, "chosen": 8,
    "expert_width": 1536, "dense_layers": 0, "dense_width": 12288, "shared_width": 0, "vocabulary": 151_936,
    "window": 40_960,
}  # fmt: skip
QWEN3_30B = QWEN3_235B | {"hidden": 2048, "layers": 48, "heads": 32, "expert_width": 768, "dense_width": 6144}
DEEPSEEK_V3 = {
    "hidden": 7168, "layers": 61, "heads": 128, "kv_heads": 128, "head_dim": 128, "experts": 256, "chosen": 8,
    "expert_width": 2048, "dense_layers": 3, "dense_width": 18_432, "shared_width": 2048, "vocabulary": 129_280,
    "window": 163_840, "q_rank": 1536, "kv_rank": 512, "rotary": 64,
}  # fmt: skip
DENSE = {"experts": 0, "chosen": 0, "expert_width": 0, "shared_width": 0, "head_dim": 128}
QWEN25_7B = DENSE | {
    "hidden": 3584, "layers": 28, "heads": 28, "kv_heads": 4, "dense_layers": 28, "dense_width": 18_944,
    "vocabulary": 152_064, "window": 131_072,
}  # fmt: skip
QWEN25_32B = QWEN25_7B | {
    "hidden": 5120, "layers": 64, "heads": 40, "kv_heads": 8, "dense_layers": 64, "dense_width": 27_648,
}  # fmt: skip
QWEN3_8B = DENSE | {
    "hidden": 4096, "layers": 36, "heads": 32, "kv_heads": 8, "dense_layers": 36, "dense_width": 12_288,
    "vocabulary": 151_936, "window": 40_960,
}  # fmt: skip
MODELS = {
    "qwen2.5-7b": QWEN25_7B,
    "qwen2.5-32b": QWEN25_32B,
    "qwen3-8b": QWEN3_8B,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3-671b": DEEPSEEK_V3,
    "deepseek-r1": DEEPSEEK_V3,
    "qwen3-235b-a22b": QWEN3_235B,
    "qwen3-30b-a3b": QWEN3_30B,
}


def find(model: ModelSettings) -> dict[str, int] | None:
    return MODELS.get(Path(model.path).name.lower()) if model.path else None


def of_folder(model: ModelSettings) -> Sizes | None:
    """From the config.json of a model that is here; None when it does not tell."""
    if model.path is None:
        return None
    try:
        raw = json.loads((look(model.path) / "config.json").read_text(encoding="utf-8"))
        return sizes(from_settings(raw.get("text_config", raw)), bool(raw.get("tie_word_embeddings", False)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def from_settings(raw: dict[str, Any]) -> dict[str, int]:
    """The same numbers as above, of a transformers config."""
    heads, layers, width = (int(raw[k]) for k in ("num_attention_heads", "num_hidden_layers", "intermediate_size"))
    experts = next((int(raw[k]) for k in ("num_experts", "n_routed_experts", "num_local_experts") if raw.get(k)), 0)
    expert_width = int(raw.get("moe_intermediate_size") or width) if experts else 0
    own = {
        "hidden": int(raw["hidden_size"]),
        "layers": layers,
        "heads": heads,
        "kv_heads": int(raw.get("num_key_value_heads") or heads),
        "head_dim": int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
        "experts": experts,
        "chosen": int(raw.get("num_experts_per_tok") or 0),
        "expert_width": expert_width,
        "dense_layers": int(raw.get("first_k_dense_replace") or 0) if experts else layers,
        "dense_width": width,
        "shared_width": int(raw.get("n_shared_experts") or 0) * expert_width,
        "vocabulary": int(raw["vocab_size"]),
        "window": int(raw.get("max_position_embeddings") or 1 << 20),
    }
    if raw.get("kv_lora_rank"):
        latent = {"q_rank": "q_lora_rank", "kv_rank": "kv_lora_rank", "rotary": "qk_rope_head_dim"}
        own |= {ours: int(raw[theirs]) for ours, theirs in latent.items()}
        own["head_dim"] = int(raw["v_head_dim"])
    return own


def cuttable(own: dict[str, int]) -> Cuttable:
    return Cuttable(
        own["layers"], own["heads"], own["kv_heads"], own["dense_width"], own["experts"], is_latent="kv_rank" in own
    )


def cuttable_of(sizes: Sizes) -> Cuttable:
    """What an engine's ranks must divide."""
    shape = sizes.shape
    experts = sizes.experts // max(1, 3 * shape.hidden * sizes.expert_width)
    return Cuttable(
        shape.layers, shape.heads, shape.kv_heads, shape.intermediate, experts, is_latent=bool(sizes.whole_attention)
    )


def sizes(own: dict[str, int], is_tied: bool = False) -> Sizes:
    h, layers = own["hidden"], own["layers"]
    attention = _latent(own) if "kv_rank" in own else 2 * h * own["head_dim"] * (own["heads"] + own["kv_heads"])
    moe_layers = layers - own["dense_layers"]
    shared = 3 * h * own["shared_width"] + own["experts"] * h  # and the router
    dense = own["dense_layers"] * 3 * h * own["dense_width"]
    visited = own["chosen"] * own["expert_width"] + own["shared_width"]
    total_dense = layers * (attention + 2 * h) + moe_layers * shared + dense
    experts = own["experts"] * 3 * h * own["expert_width"]
    embedding = own["vocabulary"] * h
    shape = Shape(
        hidden=h,
        layers=layers,
        heads=own["heads"],
        kv_heads=own["kv_heads"],
        head_dim=own["head_dim"],
        intermediate=max(visited, own["dense_width"] if own["dense_layers"] else 0),
        vocabulary=own["vocabulary"],
        window=own["window"],
        parameters=total_dense + moe_layers * experts + (1 if is_tied else 2) * embedding,
        has_head_norms=False,
        experts=own["experts"],
        expert_width=own["expert_width"] if own["experts"] else 0,
    )
    whole = attention if "kv_rank" in own else 0
    return Sizes(shape, -(-total_dense // layers), experts, moe_layers, embedding, is_tied, whole, own["expert_width"])


def _latent(own: dict[str, int]) -> int:
    """Queries and keys through low-rank projections (DeepSeek)."""
    h, heads, head, rotary = own["hidden"], own["heads"], own["head_dim"], own["rotary"]
    q = h * own["q_rank"] + own["q_rank"] * heads * (head + rotary)
    kv = h * (own["kv_rank"] + rotary) + own["kv_rank"] * heads * 2 * head
    return q + kv + heads * head * h
