"""The table shown before training: what the batch settings come to, and what the run will take."""

from __future__ import annotations

import math

from tidemill.errors import human
from tidemill.estimate.memory import checkpoint_bytes, memory
from tidemill.estimate.run import (
    checkpoints_kept,
    longest,
    samples_per_step,
    tokens_per_step,
)
from tidemill.models.shape import ModelShape, shape_of
from tidemill.recipe.config import Config
from tidemill.recipe.load import model_of


def plan(config: Config, parameters: int | None = None) -> list[tuple[str, str, str]]:
    """What the batch settings come to: label, value, how it is worked out."""
    train, shape = config.train, shape_of(model_of(config))
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


def _size_rows(config: Config, shape: ModelShape | None, parameters: int | None) -> list[tuple[str, str, str]]:
    needed = memory(config, shape, parameters) if shape else None
    count = parameters or (shape.parameters if shape else None)
    if shape is None or needed is None or count is None:
        return []
    parts = " + ".join(f"{name} {human(n)}" for name, n in needed.parts() if n)
    each = checkpoint_bytes(config, shape, count)
    kept = checkpoints_kept(config)
    return [
        ("parameters", f"{count:,}", f"{config.model.dtype}"),
        ("memory, by estimate", human(needed.total), parts),
        ("disk for checkpoints", f"at most {human(each * kept)}", f"{kept} × {human(each)}"),
    ]
