"""Small models that look, made on the spot: the part of their config.json that is about images, and how many parameters
any tower has by its sizes. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # models are opened where the settings' library is missing too
    from tidemill.recipe.config import TinyModel, TinyVision

Json = dict[str, Any]
# Special tokens of a small model's tokenizer beside its usual ones, by family.
TOKENS: dict[str, tuple[str, ...]] = {
    "qwen2_5_vl": ("<image>",),
    "qwen3_vl": ("<image>",),
    "llava": ("<image>",),
    "smolvlm": ("<image>", "<fake_token_around_image>", "<global-img>"),
    "idefics3": ("<image>", "<fake_token_around_image>", "<global-img>"),
    "gemma3": ("<image>", "<start_of_image>", "<end_of_image>"),
    "gemma4": ("<image>", "<start_of_image>", "<end_of_image>"),
}


def tokens_of(architecture: str) -> tuple[str, ...]:
    return TOKENS.get(architecture, ())


def small_config(tiny: TinyModel, text: Json, first: int) -> Json:
    """config.json of a small model that looks. `text`: of its decoder; `first`: the number of its tokenizer's first
    token for images."""
    name, eyes = tiny.architecture, _vision_of(tiny)
    begin, end = first + 1, first + 2
    vision: Json = {
        "hidden_size": eyes.hidden,
        "num_attention_heads": eyes.heads,
        "num_hidden_layers": eyes.layers,
        "intermediate_size": eyes.intermediate,
        "patch_size": eyes.patch,
        "image_size": eyes.size,
    }
    made: Json = {"model_type": name, "tie_word_embeddings": True, "text_config": text, "vision_config": vision}
    if name.startswith("qwen"):
        vision |= {"num_heads": eyes.heads, "depth": eyes.layers, "out_hidden_size": tiny.hidden}
        half = tiny.hidden // tiny.heads // 2
        each = half // 3
        text["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [half - 2 * each, each, each],
        }
        made |= {"image_token_id": first, "video_token_id": -1, "vision_start_token_id": -1, "vision_end_token_id": -1}
    match name:
        case "qwen2_5_vl":
            vision |= {"window_size": 2 * 2 * eyes.patch, "fullatt_block_indexes": list(range(1, eyes.layers, 2))}
        case "qwen3_vl":
            deep = list(range(min(eyes.layers, tiny.layers) - 1))[:3]
            vision |= {"num_position_embeddings": (eyes.size // eyes.patch) ** 2, "deepstack_visual_indexes": deep}
        case "smolvlm" | "idefics3":
            made |= {"image_token_id": first, "scale_factor": 2, "pad_token_id": text.get("pad_token_id", 0)}
        case "llava":
            vision["model_type"] = "clip_vision_model"
            made |= {"image_token_index": first, "vision_feature_layer": -1}
        case "gemma3":
            vision |= {"model_type": "siglip_vision_model", "vision_use_head": False}
            tokens = (eyes.size // eyes.patch // 2) ** 2
            made |= {"image_token_index": first, "boi_token_index": begin, "eoi_token_index": end}
            made["mm_tokens_per_image"] = tokens
        case "gemma4":
            vision |= {
                "num_key_value_heads": eyes.heads,
                "head_dim": eyes.hidden // eyes.heads,
                "pooling_kernel_size": 2,
            }
            vision["position_embedding_size"] = 4 * eyes.size // eyes.patch
            made |= {"image_token_id": first, "boi_token_id": begin, "eoi_token_id": end, "audio_config": None}
            made |= {"video_token_id": -1, "audio_token_id": -1}
            text |= {"vocab_size_per_layer_input": text["vocab_size"], "hidden_size_per_layer_input": 8}
            text |= {"global_head_dim": text["head_dim"], "num_kv_shared_layers": 0}
    return made


def small_images(tiny: TinyModel) -> Json:
    """preprocessor_config.json of such a model: every image becomes one tile of its size."""
    eyes = _vision_of(tiny)
    square = {"height": eyes.size, "width": eyes.size}
    match tiny.architecture:
        case "qwen2_5_vl" | "qwen3_vl":
            area = eyes.size**2
            return {
                "size": {"shortest_edge": area, "longest_edge": area},
                "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3,
            }
        case "smolvlm" | "idefics3":
            return {
                "size": {"longest_edge": eyes.size},
                "max_image_size": {"longest_edge": eyes.size},
                "do_image_splitting": False,
            }
        case "gemma4":
            return {
                "max_soft_tokens": (eyes.size // eyes.patch // 2) ** 2,
                "patch_size": eyes.patch,
                "pooling_kernel_size": 2,
            }
    return {"size": square, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


@dataclass(frozen=True, slots=True)
class TowerShape:
    """What a tower is made of, for estimates."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    patch: int
    merge: int  # patches along each side of what one token stands for
    parameters: int  # tower and projector, by these sizes


def tower_shape(raw: Mapping[str, Any], width: int) -> TowerShape | None:
    """Of a config.json; None for a model that reads text alone. `width`: of the decoder."""
    v = raw.get("vision_config")
    if not isinstance(v, Mapping):
        return None
    name = str(raw.get("model_type"))
    usual = USUAL.get(name, USUAL["llava"]) | {k: n for k, n in v.items() if isinstance(n, int) and n}
    hidden, layers = usual["hidden_size"], usual.get("depth") or usual["num_hidden_layers"]
    heads = usual.get("num_heads") or usual["num_attention_heads"]
    inner, patch = usual["intermediate_size"], usual["patch_size"]
    merge = int(usual.get("spatial_merge_size") or usual.get("pooling_kernel_size") or raw.get("scale_factor") or 0)
    patches = (usual.get("image_size", 0) // patch) ** 2
    if not merge:
        tokens = int(raw.get("mm_tokens_per_image") or patches)
        merge = max(1, round((patches / tokens) ** 0.5)) if tokens else 1
    square, attention = hidden * hidden, 4 * hidden * hidden + 4 * hidden
    pixels = 3 * patch * patch * hidden
    match name:
        case "qwen2_5_vl":
            block = attention + 2 * hidden + 3 * hidden * inner + 2 * inner + hidden
            ends = 2 * pixels + hidden + _merger(hidden, merge, width)
        case "qwen3_vl":
            block = attention + 4 * hidden + 2 * hidden * inner + inner + hidden
            deep = v.get("deepstack_visual_indexes", (8, 16, 24))
            merger = _merger(hidden, merge, width)
            places = usual["num_position_embeddings"] * hidden
            ends = 2 * pixels + hidden + places + merger + 2 * hidden
            ends += len(deep) * (merger + 2 * hidden * merge**2)
        case "gemma4":
            dim = usual["head_dim"]
            block = (2 * heads + 2 * usual["num_key_value_heads"]) * dim * hidden + 2 * dim + 4 * hidden
            block += 3 * hidden * inner
            ends = pixels + 2 * usual["position_embedding_size"] * hidden + hidden * width
        case _:
            block = attention + 4 * hidden + 2 * hidden * inner + inner + hidden
            ends = pixels + (patches + 1) * hidden + 2 * hidden
            ends += {
                "smolvlm": square // hidden * merge**2 * width,
                "idefics3": square // hidden * merge**2 * width,
                "gemma3": hidden * width + hidden,
            }.get(name, hidden * width + width * width + 2 * width + hidden + 3 * hidden - hidden)
    return TowerShape(layers, hidden, inner, heads, patch, merge, layers * block + ends)


def _merger(hidden: int, merge: int, width: int) -> int:
    wide = hidden * merge**2
    return wide * wide + wide + wide * width + width


# Sizes of towers whose config.json leaves out what is usual.
USUAL: dict[str, dict[str, int]] = {
    "qwen2_5_vl": {"hidden_size": 3584, "depth": 32, "num_heads": 16, "intermediate_size": 3420, "patch_size": 14,
                   "spatial_merge_size": 2},
    "qwen3_vl": {"hidden_size": 1152, "depth": 27, "num_heads": 16, "intermediate_size": 4304, "patch_size": 16,
                 "spatial_merge_size": 2, "num_position_embeddings": 2304},
    "smolvlm": {"hidden_size": 1152, "num_hidden_layers": 12, "num_attention_heads": 16, "intermediate_size": 3072,
                "patch_size": 32, "image_size": 224},
    "idefics3": {"hidden_size": 1152, "num_hidden_layers": 12, "num_attention_heads": 16, "intermediate_size": 3072,
                 "patch_size": 32, "image_size": 224},
    "llava": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
              "patch_size": 14, "image_size": 336},
    "gemma3": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
               "patch_size": 16, "image_size": 224},
    "gemma4": {"hidden_size": 768, "num_hidden_layers": 16, "num_attention_heads": 12, "num_key_value_heads": 12,
               "head_dim": 64, "intermediate_size": 3072, "patch_size": 16, "pooling_kernel_size": 3,
               "position_embedding_size": 10240},
}  # fmt: skip


def _vision_of(tiny: TinyModel) -> TinyVision:
    """Return the tower's settings, or the usual ones where the recipe gives none."""
    from tidemill.recipe.config import TinyVision

    return tiny.vision or TinyVision()
