"""Buffers that belong to a model as its parameters do: in its folder, its checkpoints, and wherever its weights go."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def persistent(model: Any) -> dict[str, Tensor]:
    """By name. What a module works out for itself, such as rotary tables, is not among them."""
    return {
        f"{at}.{name}" if at else name: buffer
        for at, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def carried(model: Any) -> dict[str, Tensor]:
    """Parameters and these, as whoever serves the model has them."""
    return {name: p.detach() for name, p in model.named_parameters()} | persistent(model)
