"""Import a GGUF file: a Hugging Face folder with float weights, tokenizer and generation settings.

Tensors are dequantised and written shard by shard, so memory holds one shard however large the model is. The folder is
written aside and renamed when it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tidemill.errors import ConfigError, ModelError
from tidemill.models.gguf import families, tensors, words
from tidemill.models.gguf.file import Opened, open_file

SHARD_BYTES = 4 << 30
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Imported:
    folder: Path
    architecture: str
    parameters: int
    quantisations: dict[str, int]  # tensors of each


def import_file(path: Path, folder: Path, *, dtype: str = "float32", tokenizer: Path | None = None) -> Imported:
    """Write the file's model as `folder`. `tokenizer`: a Hugging Face folder whose tokenizer is taken instead."""
    if folder.exists() and (folder.is_file() or any(folder.iterdir())):
        raise ConfigError(f"--to {folder} is not empty", "name a new folder")
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype} is not known", f"{', '.join(DTYPES)} are")
    opened = open_file(path)
    family = families.family_of(opened)
    settings = family.settings(opened)
    own = words.from_folder(tokenizer) if tokenizer is not None else words.tokenizer_of(opened)
    ends = words.end_ids(opened, own) if tokenizer is None else [own.eos_token_id]
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        module = _write_settings(opened, family, settings, own, ends, dtype, aside)
        written = _write_weights(tensors.converted(opened, family, settings), aside, DTYPES[dtype])
        _check_whole(opened, module, written)
        own.save_pretrained(aside)
        if folder.exists():
            folder.rmdir()
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    count = sum(torch.Size(shape).numel() for shape in written.values())
    return Imported(folder, type(module).__name__, count, _quantisations(opened))


def _write_settings(
    opened: Opened,
    family: families.Family,
    settings: dict[str, Any],
    tokenizer: Any,
    ends: list[int],
    dtype: str,
    folder: Path,
) -> Any:
    """Write config files, and return the model without its weights, by which these are judged."""
    special = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    try:
        config = AutoConfig.for_model(family.model_type, **settings, **special, eos_token_id=ends[0])
    except Exception as error:
        raise ModelError(f"{opened.path}: transformers refuses its settings: {error}") from error
    config.dtype = DTYPES[dtype]
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    config.architectures = [type(module).__name__]
    config.save_pretrained(folder)
    generation = GenerationConfig(**special, eos_token_id=ends if len(ends) > 1 else ends[0])  # type: ignore[no-untyped-call]
    generation.save_pretrained(folder)
    return module


def _write_weights(
    found: Iterator[tuple[str, tensors.Array]], folder: Path, dtype: torch.dtype
) -> dict[str, tuple[int, ...]]:
    """Write the shards, and return the shapes of all tensors by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    shards: list[list[str]] = []
    for shard in _shards(found, dtype):
        save_file(shard, folder / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
        shapes |= {name: tuple(tensor.shape) for name, tensor in shard.items()}
    _name_shards(folder, shards, sum(torch.Size(s).numel() for s in shapes.values()) * dtype.itemsize)
    return shapes


def _shards(found: Iterator[tuple[str, tensors.Array]], dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, values in found:
        # A copy: values may be a view of the mapped file, or of a matrix that holds more than this tensor.
        shard[name] = torch.tensor(values).to(dtype).contiguous()
        size += shard[name].nbytes
        if size >= SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> None:
    if len(shards) == 1:
        (folder / "shard-0.safetensors").rename(folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for i, names in enumerate(shards):
        called = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{i}.safetensors").rename(folder / called)
        places |= dict.fromkeys(names, called)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _check_whole(opened: Opened, module: Any, written: dict[str, tuple[int, ...]]) -> None:
    """Refuse a file of which not every weight has come in its shape. Experts, stacked in the module and single in a
    folder, are counted."""
    wanted = {name: tuple(p.shape) for name, p in module.named_parameters()}  # a tied head is not among them
    single = {name: shape for name, shape in written.items() if ".experts." not in name}
    expected = {name: shape for name, shape in wanted.items() if ".experts." not in name}
    for name in sorted(expected.keys() | single.keys()):
        if expected.get(name) != single.get(name):
            raise ModelError(
                f"{opened.path} does not fit {type(module).__name__}: {name} is {single.get(name, 'missing')}, "
                f"should be {expected.get(name, 'absent')}",
                "get the file anew; if it is whole, take the model as a Hugging Face folder",
            )
    stacked = sum(torch.Size(shape).numel() for name, shape in wanted.items() if ".experts." in name)
    came = sum(torch.Size(shape).numel() for name, shape in written.items() if ".experts." in name)
    if stacked != came:
        raise ModelError(f"{opened.path} has {came:,} weights of experts, should have {stacked:,}", "get it anew")


def _quantisations(opened: Opened) -> dict[str, int]:
    found: dict[str, int] = {}
    for tensor in opened.stored.values():
        found[tensor.tensor_type.name] = found.get(tensor.tensor_type.name, 0) + 1
    return found
