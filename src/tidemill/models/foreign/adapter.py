"""Adapters in peft's format, such as TRL's checkpoints with LoRA: added to the weights of their base model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tidemill.errors import ModelError

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Settings that change what a layer computes beside adding B·A, and the value at which they do not.
PLAIN: dict[str, Any] = {
    "peft_type": "LORA", "use_dora": False, "fan_in_fan_out": False, "bias": "none", "lora_bias": False,
    "rank_pattern": {}, "alpha_pattern": {}, "target_parameters": None,
}  # fmt: skip


def settings_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    for name, plain in PLAIN.items():
        if (given := found.get(name, plain)) not in (plain, None):
            raise ModelError(f"{folder}: adapters with {name}={given!r} cannot be merged", "merge them with peft first")
    return found


def merged(folder: Path, base: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the base model's tensors with the adapters in them."""
    settings = settings_of(folder)
    rank = settings["r"]
    scale = settings["lora_alpha"] / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    parts = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    for file in sorted(base.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                yield name, _changed(name, opened.get_tensor(name), parts, scale)
    if parts:
        raise ModelError(
            f"{folder}: {base} has no tensor for {next(iter(parts))}", "--definition names another base model"
        )


def _changed(name: str, tensor: Tensor, parts: dict[str, Tensor], scale: float) -> Tensor:
    if (whole := parts.pop(name, None)) is not None:  # of modules_to_save
        return whole
    stem = name.removesuffix(".weight")
    a, b = parts.pop(f"{stem}.lora_A.weight", None), parts.pop(f"{stem}.lora_B.weight", None)
    return tensor if a is None or b is None else tensor.float() + scale * (b.float() @ a.float())
