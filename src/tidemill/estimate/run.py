"""What a run is, worked out from its settings alone: the model's shape and parameters, batch sizes, disk.

Parameter counts are exact (from safetensors headers, or from a small model's settings).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.models.box import find
from tidemill.recipe.config import Config, ModelSettings, TinyModel

BYTES = {"float32": 4, "bfloat16": 2}
SPECIAL_TOKENS = 3  # of a small model's tokenizer: padding, end, unknown
HEAD_NORMS = ("qwen3", "gemma3")
DEFAULT_VOCABULARY = 32_000  # when config.json does not say
MIXTURES = ("qwen3_moe", "mixtral")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a decoder's memory depends on."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of all experts a token visits
    vocabulary: int
    window: int | None
    parameters: int | None
    has_head_norms: bool = False  # queries and keys are normed, and kept before and after
    experts: int = 0  # of one layer; 0: no mixture
    expert_width: int = 0


def shape_of(model: ModelSettings) -> Shape | None:
    """None when the model's folder does not tell, or when a warm start not yet looked up makes the model."""
    if model.path is None and model.warm_start is not None:
        return None
    if model.path is None:
        return _tiny_shape(model.tiny or TinyModel())
    folder = find.look(model.path)
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    text = raw.get("text_config", raw) if isinstance(raw, dict) else {}
    return _folder_shape(text, _folder_parameters(folder))


def _tiny_shape(tiny: TinyModel) -> Shape:
    vocabulary = len(dict.fromkeys(tiny.alphabet)) + SPECIAL_TOKENS
    head = tiny.hidden // tiny.heads
    q, kv = tiny.heads * head, tiny.kv_heads * head
    is_mixture = tiny.architecture in MIXTURES
    experts, visited = (tiny.experts, tiny.experts_per_token) if is_mixture else (1, 1)
    layer = tiny.hidden * (2 * q + 2 * kv) + 3 * tiny.hidden * tiny.intermediate * experts + 2 * tiny.hidden
    layer += tiny.hidden * experts if is_mixture else 0  # the router
    layer += {"qwen3": 2 * head, "qwen3_moe": 2 * head, "qwen2": q + 2 * kv}.get(tiny.architecture, 0)  # norms, biases
    parameters = vocabulary * tiny.hidden + tiny.layers * layer + tiny.hidden
    return Shape(
        tiny.hidden,
        tiny.layers,
        tiny.heads,
        tiny.kv_heads,
        head,
        tiny.intermediate * visited,
        vocabulary,
        tiny.window,
        parameters,
        tiny.architecture in ("qwen3", "qwen3_moe"),
        experts if is_mixture else 0,
        tiny.intermediate if is_mixture else 0,
    )


def _folder_shape(raw: dict[str, Any], parameters: int | None) -> Shape | None:
    hidden, layers, heads = (_most(raw, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    if not (hidden and layers and heads):
        return None
    experts = _most(raw, "num_experts_per_tok")
    wide = _most(raw, "intermediate_size") or 4 * hidden
    expert_width = _most(raw, "moe_intermediate_size") or wide
    counts = (_most(raw, name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return Shape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_most(raw, "num_key_value_heads") or heads,
        head_dim=_most(raw, "head_dim") or hidden // heads,
        intermediate=experts * expert_width if experts else wide,
        vocabulary=_most(raw, "vocab_size") or DEFAULT_VOCABULARY,
        window=_most(raw, "max_position_embeddings") or None,
        parameters=parameters,
        has_head_norms=str(raw.get("model_type", "")).startswith(HEAD_NORMS),
        experts=next((n for n in counts if n), 0) if experts else 0,
        expert_width=expert_width if experts else 0,
    )


def _most(raw: dict[str, Any], name: str) -> int:
    """A size, or the largest where each layer has its own; 0 when the file does not say it in numbers."""
    value = raw.get(name)
    values = value if isinstance(value, list) and value else [value]
    return max(int(x) if isinstance(x, int | float) else 0 for x in values)


def _folder_parameters(folder: Path) -> int | None:
    """Exact, from the headers of the safetensors files: 8 bytes of length, then JSON. No tensor is read."""
    count = 0
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            count += sum(math.prod(t["shape"]) for name, t in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError):
        return None  # a broken file is reported when it is opened
    return count or None


def longest(config: Config) -> int:
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def samples_per_step(config: Config) -> int:
    return config.train.prompts_per_step * config.train.samples_per_prompt


def tokens_per_step(config: Config) -> int:
    return samples_per_step(config) * longest(config)


def microbatch_tokens(config: Config) -> tuple[int, int]:
    """(tokens computed, response tokens among them) of the largest micro-batch, when every sample is as long as it may
    be. Samples, or groups that share their prompt, are not cut, so a micro-batch is seldom full."""
    budget, samples = config.train.tokens_per_microbatch, samples_per_step(config)
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    each = config.train.samples_per_prompt if config.learn.share_prompts else 1
    each = min(each, max(1, (budget - prompt) // response))
    unit, units = prompt + each * response, math.ceil(samples / each)
    bins = math.ceil(units / max(1, budget // unit))
    most = math.ceil(units / bins)
    return most * unit, most * each * response


def tokens_computed(config: Config) -> int:
    """Of one update at most: a group's prompt counts once where it is shared."""
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    each = config.train.samples_per_prompt
    prompts = 1 if config.learn.share_prompts else each
    return config.train.prompts_per_step * (prompts * prompt + each * response) // config.train.updates_per_step


def cache_tokens(config: Config) -> int:
    if config.rollout.cache_tokens is not None:
        return config.rollout.cache_tokens
    page = config.rollout.page_size or 32  # the largest that an engine chooses by itself
    at_once = min(config.rollout.concurrent, max(samples_per_step(config), config.eval.size))
    return at_once * math.ceil(longest(config) / page) * page


def checkpoints_kept(config: Config) -> int:
    return config.checkpoint.keep + 1


def human(size: float) -> str:
    """Bytes for people: 512 B, 34 kB, 1.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.5:
            return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
