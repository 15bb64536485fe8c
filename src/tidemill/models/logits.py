"""What a model makes of its head's product before it calls it logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DIVIDES_STATES = "logits_mup_width_multiplier"  # the states that the head takes: the same, as it has no bias


def scale(settings: Any) -> float:
    """The factor of a model with these (text) settings. Cohere's multiplies; Granite's, MiniCPM's and Inkling's
    divide."""
    if str(settings.model_type).startswith("cohere"):
        return float(getattr(settings, "logit_scale", None) or 1.0)
    factor = float(getattr(settings, "logits_scaling", None) or getattr(settings, DIVIDES_STATES, None) or 1.0)
    return factor if settings.model_type == "hyperclovax" else 1.0 / factor


def shape(model: Any, temperature: float) -> dict[str, Any]:
    """How `token_logprobs` gets from products to the logits that are sampled at `temperature` (0: as at 1)."""
    settings = model.config.get_text_config()
    return {
        "temperature": (temperature or 1.0) / scale(settings),
        "softcap": getattr(settings, "final_logit_softcapping", None),
    }


def of(model: Any, hidden: Tensor) -> Tensor:
    """(tokens, width) of the decoder → (tokens, words)."""
    made: Tensor = model.get_output_embeddings()(hidden)
    how = shape(model, 1.0)
    cap: float | None = how["softcap"]
    bounded = made if cap is None else cap * torch.tanh(made / cap)
    factor = float(how["temperature"])
    return bounded if factor == 1.0 else bounded / factor
