"""Import a GGUF file: a Hugging Face folder with float weights, tokenizer and generation settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tidemill.errors import ModelError
from tidemill.models.foreign.write import check_whole, dtype_of, new_folder, write_weights
from tidemill.models.gguf import families, tensors, words
from tidemill.models.gguf.file import Opened, open_file


@dataclass(frozen=True, slots=True)
class Imported:
    folder: Path
    architecture: str
    parameters: int
    quantisations: dict[str, int]  # tensors of each


def import_file(path: Path, folder: Path, *, dtype: str = "float32", tokenizer: Path | None = None) -> Imported:
    """Write the file's model as `folder`. `tokenizer`: a Hugging Face folder whose tokenizer is taken instead."""
    kind = dtype_of(dtype)
    opened = open_file(path)
    family = families.family_of(opened)
    settings = family.settings(opened)
    own = words.from_folder(tokenizer) if tokenizer is not None else words.tokenizer_of(opened)
    ends = words.end_ids(opened, own) if tokenizer is None else [own.eos_token_id]
    with new_folder(folder) as aside:
        module = _write_settings(opened, family, settings, own, ends, kind, aside)
        written = write_weights(tensors.converted(opened, family, settings), aside, kind)
        check_whole(opened.path, module, written)
        own.save_pretrained(aside)
    count = sum(torch.Size(shape).numel() for shape in written.values())
    return Imported(folder, type(module).__name__, count, _quantisations(opened))


def _write_settings(
    opened: Opened,
    family: families.Family,
    settings: dict[str, Any],
    tokenizer: Any,
    ends: list[int],
    dtype: torch.dtype,
    folder: Path,
) -> Any:
    """Write config files, and return the model without its weights, by which these are judged."""
    special = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    try:
        config = AutoConfig.for_model(family.model_type, **settings, **special, eos_token_id=ends[0])
    except Exception as error:
        raise ModelError(f"{opened.path}: transformers refuses its settings: {error}") from error
    config.dtype = dtype
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    config.architectures = [type(module).__name__]
    config.save_pretrained(folder)
    generation = GenerationConfig(**special, eos_token_id=ends if len(ends) > 1 else ends[0])  # type: ignore[no-untyped-call]
    generation.save_pretrained(folder)
    return module


def _quantisations(opened: Opened) -> dict[str, int]:
    found: dict[str, int] = {}
    for tensor in opened.stored.values():
        found[tensor.tensor_type.name] = found.get(tensor.tensor_type.name, 0) + 1
    return found
