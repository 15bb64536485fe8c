"""Gives a model its eyes: by its model_type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tidemill.models.vision.eyes.eyes import Eyes
from tidemill.models.vision.eyes.fixed import Gemma3Eyes, IdeficsEyes, LlavaEyes
from tidemill.models.vision.eyes.gemma4 import Gemma4Eyes
from tidemill.models.vision.eyes.qwen import QwenEyes
from tidemill.models.vision.views.view import View

KINDS: dict[str, Callable[[Any, Any], Eyes]] = {
    "qwen2_5_vl": QwenEyes,
    "qwen3_vl": QwenEyes,
    "idefics3": IdeficsEyes,
    "smolvlm": IdeficsEyes,
    "llava": LlavaEyes,
    "gemma3": Gemma3Eyes,
    "gemma4": Gemma4Eyes,
}


def give_eyes(model: Any, view: View | None) -> None:
    """`view` is what the model's folder says of images; None for a model that reads text alone."""
    if view is None:
        return
    model.eyes = KINDS[model.config.model_type](model, view)
