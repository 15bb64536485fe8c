"""The view of a model: by its config.json, and what its folder says of images."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tidemill.errors import ConfigError, ModelError
from tidemill.models.vision.views import gemma4, idefics, qwen, square
from tidemill.models.vision.views.view import CannotPlan, View

Make = Callable[[Mapping[str, Any], Mapping[str, Any], Callable[[int], str]], View]
KINDS: dict[str, Make] = {
    "qwen2_5_vl": qwen.make,
    "qwen3_vl": qwen.make,
    "idefics3": idefics.make,
    "smolvlm": idefics.make,
    "llava": square.make_llava,
    "gemma3": square.make_gemma3,
    "gemma4": gemma4.make,
}
# What a folder keeps of images and conversations beside the model and the tokenizer, and what an export brings along.
FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "chat_template.json")


def looks(config: Mapping[str, Any]) -> bool:
    """Whether a model with this config.json takes images, in a form that is known here."""
    return config.get("model_type") in KINDS and bool(config.get("vision_config"))


def view_of(config: Mapping[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> View | None:
    """None for a model that reads text alone. `settings`: what its preprocessor_config.json says."""
    if not looks(config):
        return None
    try:
        return KINDS[config["model_type"]](config, settings, lambda i: str(tokenizer.convert_ids_to_tokens(i)))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"the model does not say how it takes images: {type(error).__name__}: {error}",
            "its folder needs the model's own config.json, tokenizer and preprocessor_config.json",
        ) from error


def within(view: View, max_tokens: int | None) -> View:
    """With at most so many tokens an image."""
    try:
        return view if max_tokens is None else view.within(max_tokens)
    except CannotPlan as error:
        raise ConfigError(str(error), "raise it, or set data.images.max_tokens=none") from None


def settings_of(folder: Path | None) -> dict[str, Any]:
    """What preprocessor_config.json says, or the same inside of processor_config.json; nothing where neither is."""
    found: dict[str, Any] = {}
    for name in FILES[:2] if folder is not None else ():
        try:
            raw = json.loads((folder / name).read_text(encoding="utf-8"))  # type: ignore[operator]
        except (OSError, ValueError):
            continue
        inside = raw.get("image_processor", raw if name == FILES[0] else {})
        found |= {key: value for key, value in inside.items() if value is not None}
    return found
