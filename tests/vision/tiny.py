"""Tiny random models that look, one of every family in docs/vision.md, and prompts that show something."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tidemill.models import shape as shapes
from tidemill.models.load import LoadedModel, make_tiny
from tidemill.models.shape import _small_decoder as small_decoder
from tidemill.models.vision.eyes import eyes
from tidemill.recipe.config import TinyModel, TinyVision
from tidemill.tiles import Tile, Tiles

# Of several shapes where the family keeps them, in units of what one token stands for.
SHAPES = {
    "qwen2_5_vl": ((2, 3), (4, 4), (3, 1)),
    "qwen3_vl": ((2, 3), (4, 4), (3, 1)),
    "gemma4": ((2, 3), (4, 4), (3, 1)),
}

SHAPE: dict[str, Any] = {
    "hidden": 32, "layers": 3, "heads": 4, "kv_heads": 2, "intermediate": 64, "window": 320,
    "alphabet": "0123456789abcdefghijklmnopqrstuvwxyz ",
    "vision": TinyVision(size=32, patch=4, hidden=32, layers=3, heads=4, intermediate=48),
}  # fmt: skip
# Decoders whose layers see images whole, some of them through a window that is shorter than an image.
WHOLE = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3", WHOLE),
    "gemma4": ("gemma4", WHOLE | {"use_bidirectional_attention": "vision"}),
    "gemma4-causal": ("gemma4", {"use_bidirectional_attention": None}),
}
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3", "llava", *CHANGES)


def tiny_model(name: str, seed: int = 0, scale: float = 4.0, **changes: Any) -> LoadedModel:
    architecture, text = CHANGES.get(name, (name, {}))
    shape = TinyModel(architecture=architecture, **{**SHAPE, **changes})
    with patch.object(shapes, "_small_decoder", lambda *given: small_decoder(*given) | text):
        loaded = make_tiny(shape, torch.float32, seed, torch.device("cpu"))
    with torch.no_grad():  # fresh weights are so small that logits hardly differ
        for parameter in loaded.model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale) if parameter.any() else parameter.normal_(0.0, 0.1)
    return loaded


def tile_of(rng: np.random.Generator, loaded: LoadedModel, at: int, image: int = 0) -> Tile:
    """A random one of a random size that the model takes."""
    view = eyes.of(loaded.model).view  # type: ignore[union-attr]
    name = loaded.model.config.model_type
    if name in SHAPES:
        rows, columns = SHAPES[name][rng.integers(len(SHAPES[name]))]
        size = rows * view.side, columns * view.side  # type: ignore[attr-defined]
    else:
        (size,) = view.plan(32, 32).tiles
    rows, columns = view.grid(size)
    return Tile(rng.integers(0, 256, (*size, 3), dtype=np.uint8), at, rows * columns, image)


def prompt_of(rng: np.random.Generator, loaded: LoadedModel, images: int, words: int) -> tuple[list[int], Tiles]:
    """Words with images between them."""
    token = eyes.of(loaded.model).view.token  # type: ignore[union-attr]
    tokens: list[int] = []
    tiles: list[Tile] = []
    for i in range(images + 1):
        tokens += rng.integers(3, 38, rng.integers(1, words + 1)).tolist()
        if i < images:
            tiles.append(tile_of(rng, loaded, len(tokens), i))
            tokens += [token] * tiles[-1].tokens
    return tokens, tuple(tiles)
