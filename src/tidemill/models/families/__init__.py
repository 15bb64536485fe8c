"""What is to be known of a model family: one file each, found by the `model_type` of config.json. Needs no torch.

A family without a file works too, by the usual words of config.json; a file says what else it has, or says it faster.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from tidemill.imports import files_of


@dataclass(frozen=True, slots=True)
class Family:
    """Facts of one family, in its file as `FAMILY`."""

    name: str  # `model_type` in config.json
    # The prefix of its transformers classes where its layers are Llama's (norm, rotary attention, norm, gated SiLU or
    # experts): these have fused forms, a lean forward pass in rollout, and engines over several ranks.
    llama_form: str = ""
    latent_form: str = ""  # the same where attention is multi-head latent attention: its lean pass has a latent cache
    has_bias: bool = False  # of queries, keys and values
    has_head_norms: bool = False  # queries and keys are normed
    is_tied: bool = False  # the output layer is the embedding unless config.json says otherwise
    experts: str = ""  # the word for the number of experts in a layer; "": the usual ones
    expert_width: str = "moe_intermediate_size"  # the word for the width inside an expert
    shared_width: str = ""  # the word for the width of the experts that every token visits; "": their number says it
    decoder: str = ""  # of a family that takes images: the model_type of its decoder, where it is another family's
    words: Mapping[str, str] = field(default_factory=dict)  # the usual word: what config.json has in its place
    small: Mapping[str, Any] = field(default_factory=dict)  # what a small model's config.json needs more


def names() -> list[str]:
    return files_of(__name__)


def find(model_type: str) -> Family:
    """The family's own file, also where its decoder is named alone (`qwen3_vl_text`); else that of the family it is
    called after, whose sizes it shares."""
    known = names()
    if (own := model_type.removesuffix("_text")) in known:
        return _read(own)
    after = [name for name in known if model_type.startswith(name)]
    return (
        replace(_read(max(after, key=len)), name=model_type, llama_form="", latent_form="")
        if after
        else Family(model_type)
    )


def llama_forms(mixtures: bool = False) -> dict[str, str]:
    """Families whose layers are Llama's, with the prefix of their classes; with those that have experts, or without."""
    return _forms(tuple(names()), mixtures)


def served_over_ranks() -> tuple[str, ...]:
    """Families that engines over several ranks serve."""
    return tuple(sorted({*llama_forms(mixtures=True), *latent_forms()}))


def latent_forms() -> dict[str, str]:
    """Families with multi-head latent attention, with the prefix of their classes."""
    return {one.name: one.latent_form for one in map(_read, names()) if one.latent_form}


@cache
def _forms(known: tuple[str, ...], mixtures: bool) -> dict[str, str]:
    forms = [one for one in map(_read, known) if one.llama_form and (mixtures or not one.experts)]
    return {one.name: one.llama_form for one in forms}


def _read(name: str) -> Family:
    found: Family = importlib.import_module(f"{__name__}.{name}").FAMILY
    return found
