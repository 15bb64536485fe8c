"""What a run will take, worked out from its settings alone: parameters, memory, disk, batch sizes.

Parameter counts are exact (from safetensors headers, or from a small model's settings). Memory is an estimate of the
largest it gets; a test holds its activation part against what autograd really keeps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tidemill.config import Config, Model, TinyModel

BYTES = {"float32": 4, "bfloat16": 2}
SPECIAL_TOKENS = 3  # of a small model's tokenizer: padding, end, unknown
CRITICS = frozenset({"ppo"})  # algorithms that train a second model of the same size
REFERENCED = frozenset({"dpo", "ipo", "kto"})  # those that need the frozen reference whatever kl.coef is
DEFAULT_VOCABULARY = 32_000  # when config.json does not say


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


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes at the peak of a step, in the order they are shown."""

    weights: int
    gradients: int
    optimizer: int
    critic: int
    reference: int
    activations: int
    logits: int
    cache: int

    @property
    def total(self) -> int:
        return sum(n for _, n in self.parts())

    def parts(self) -> Iterator[tuple[str, int]]:
        for field in fields(self):
            yield field.name, getattr(self, field.name)


def shape_of(model: Model) -> Shape | None:
    """None when the model's folder does not tell, or when a warm start not yet looked up makes the model."""
    if model.path is None and model.warm_start is not None:
        return None
    if model.path is None:
        return _tiny_shape(model.tiny or TinyModel())
    folder = Path(model.path).expanduser()
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
    layer = tiny.hidden * (2 * q + 2 * kv) + 3 * tiny.hidden * tiny.intermediate + 2 * tiny.hidden
    layer += {"qwen3": 2 * head, "qwen2": q + 2 * kv, "llama": 0}[tiny.architecture]  # head norms, biases
    parameters = vocabulary * tiny.hidden + tiny.layers * layer + tiny.hidden
    return Shape(
        tiny.hidden,
        tiny.layers,
        tiny.heads,
        tiny.kv_heads,
        head,
        tiny.intermediate,
        vocabulary,
        tiny.window,
        parameters,
    )


def _folder_shape(raw: dict[str, Any], parameters: int | None) -> Shape | None:
    try:
        hidden, layers, heads = (int(raw[k]) for k in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    except (KeyError, TypeError, ValueError):
        return None
    experts = int(raw.get("num_experts_per_tok") or 0)
    wide = int(raw.get("intermediate_size") or 4 * hidden)
    window = raw.get("max_position_embeddings")
    return Shape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        intermediate=experts * int(raw.get("moe_intermediate_size") or wide) if experts else wide,
        vocabulary=int(raw.get("vocab_size") or DEFAULT_VOCABULARY),
        window=int(window) if window else None,
        parameters=parameters,
    )


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


def memory(config: Config, shape: Shape, parameters: int | None = None) -> Memory | None:
    count = parameters or shape.parameters
    if count is None:
        return None
    width = BYTES[config.model.dtype]
    algorithm = config.algorithm
    frozen = (algorithm.kl.coef > 0 or algorithm.name in REFERENCED) + (algorithm.teacher is not None)
    return Memory(
        weights=count * width,
        gradients=count * width,
        optimizer=2 * count * width,
        critic=4 * count * width if algorithm.name in CRITICS else 0,  # weights, gradients, two moments
        reference=frozen * count * width,
        activations=activation_bytes(shape, microbatch_tokens(config), width, config.learn.recompute == "full"),
        # logits, their softmax and its gradient, in float32
        logits=3 * 4 * shape.vocabulary * min(config.learn.logprob_chunk, microbatch_tokens(config)),
        cache=cache_tokens(config) * shape.layers * 2 * shape.kv_heads * shape.head_dim * width,
    )


def activation_bytes(shape: Shape, tokens: int, width: int, recompute: bool) -> int:
    """What backward needs of the layers: everything, or each layer's input and one layer in full."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # Two norms keep input, scaled input and output; heads are normed and turned; the MLP keeps four of its width.
    layer = 6 * shape.hidden + 4 * q + 6 * kv + 4 * shape.intermediate
    kept = shape.layers * shape.hidden + layer if recompute else shape.layers * layer
    return tokens * width * kept


def longest(config: Config) -> int:
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def samples_per_step(config: Config) -> int:
    return config.train.prompts_per_step * config.train.samples_per_prompt


def tokens_per_step(config: Config) -> int:
    return samples_per_step(config) * longest(config)


def microbatch_tokens(config: Config) -> int:
    """At most: a step smaller than the budget does not fill it."""
    return min(config.train.tokens_per_microbatch, tokens_per_step(config))


def cache_tokens(config: Config) -> int:
    if config.rollout.cache_tokens is not None:
        return config.rollout.cache_tokens
    page = config.rollout.page_size or 32  # the largest that an engine chooses by itself
    at_once = min(config.rollout.concurrent, max(samples_per_step(config), config.eval.size))
    return at_once * math.ceil(longest(config) / page) * page


def checkpoint_bytes(config: Config, parameters: int) -> int:
    """Weights and AdamW's two moments."""
    return 3 * parameters * BYTES[config.model.dtype]


def checkpoints_kept(config: Config) -> int:
    return config.checkpoint.keep + 1


def plan(config: Config, model: Model, parameters: int | None = None) -> list[tuple[str, str, str]]:
    """The table shown before training: label, value, how it is worked out."""
    train, shape = config.train, shape_of(model)
    samples, tokens = samples_per_step(config), tokens_per_step(config)
    updates = train.updates_per_step * train.passes_per_step
    per_update = samples // train.updates_per_step
    micro = math.ceil(per_update * longest(config) / train.tokens_per_microbatch)
    rows = [
        ("samples per step", f"{samples:,}", f"{train.prompts_per_step} prompts × {train.samples_per_prompt} samples"),
        ("updates per step", f"{updates:,}", f"{train.updates_per_step} × {train.passes_per_step} passes"),
        ("samples per update", f"{per_update:,}", f"{samples:,} samples / {train.updates_per_step} updates"),
        (
            "micro-batches per update",
            f"at most {micro:,}",
            f"{per_update:,} samples × {longest(config):,} tokens / {train.tokens_per_microbatch:,}",
        ),
        (
            "tokens per sample",
            f"at most {longest(config):,}",
            f"{config.data.max_prompt_tokens:,} of prompt + {config.rollout.max_new_tokens:,} of response",
        ),
        ("tokens per step", f"at most {tokens:,}", f"{samples:,} samples × {longest(config):,} tokens"),
        ("steps", f"{train.steps:,}", f"{train.steps * updates:,} updates, at most {tokens * train.steps:,} tokens"),
    ]
    return rows + _size_rows(config, shape, parameters)


def _size_rows(config: Config, shape: Shape | None, parameters: int | None) -> list[tuple[str, str, str]]:
    needed = memory(config, shape, parameters) if shape else None
    count = parameters or (shape.parameters if shape else None)
    if needed is None or count is None:
        return []
    parts = " + ".join(f"{name} {human(n)}" for name, n in needed.parts() if n)
    each = checkpoint_bytes(config, count)
    kept = checkpoints_kept(config)
    return [
        ("parameters", f"{count:,}", f"{config.model.dtype}"),
        ("memory, by estimate", human(needed.total), parts),
        ("disk for checkpoints", f"at most {human(each * kept)}", f"{kept} × {human(each)}"),
    ]


def human(size: float) -> str:
    """Bytes for people: 512 B, 34 kB, 1.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.5:
            return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
