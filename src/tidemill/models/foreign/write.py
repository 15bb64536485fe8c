"""Write a Hugging Face folder from another form: weights shard by shard, so that memory holds one shard however large
the model is. The folder is written aside and renamed when it is whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor

from tidemill.errors import ConfigError, ModelError

SHARD_BYTES = 4 << 30
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Values = Tensor | npt.NDArray[np.generic]


def dtype_of(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"--dtype {name} is not known", f"{', '.join(DTYPES)} are")
    return DTYPES[name]


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give a folder to write into; it becomes `folder` if nothing fails."""
    if folder.exists() and (folder.is_file() or any(folder.iterdir())):
        raise ConfigError(f"--to {folder} is not empty", "name a new folder")
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        if folder.exists():
            folder.rmdir()
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_weights(found: Iterable[tuple[str, Values]], folder: Path, dtype: torch.dtype) -> dict[str, tuple[int, ...]]:
    """Write the shards, and return the shapes of all tensors by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    shards: list[list[str]] = []
    for shard in _shards(found, dtype):
        save_file(shard, folder / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
        shapes |= {name: tuple(tensor.shape) for name, tensor in shard.items()}
    _name_shards(folder, shards, sum(torch.Size(s).numel() for s in shapes.values()) * dtype.itemsize)
    return shapes


def _shards(found: Iterable[tuple[str, Values]], dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, values in found:
        # A copy: values may be a view of a mapped file, or of a matrix that holds more than this tensor.
        shard[name] = torch.as_tensor(values).to(dtype, copy=True).contiguous()
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


def check_whole(path: Path, module: Any, written: dict[str, tuple[int, ...]]) -> None:
    """Refuse a source of which not every weight has come in its shape. Experts, stacked in the module and single in a
    folder, are counted."""
    wanted = {name: tuple(p.shape) for name, p in module.named_parameters()}  # a tied head is not among them
    single = {name: shape for name, shape in written.items() if ".experts." not in name}
    expected = {name: shape for name, shape in wanted.items() if ".experts." not in name}
    for name in sorted(expected.keys() | single.keys()):
        if expected.get(name) != single.get(name):
            raise ModelError(
                f"{path} does not fit {type(module).__name__}: {name} is {single.get(name, 'missing')}, "
                f"should be {expected.get(name, 'absent')}",
                "get it anew; if it is whole, take the model as a Hugging Face folder",
            )
    stacked = sum(torch.Size(shape).numel() for name, shape in wanted.items() if ".experts." in name)
    came = sum(torch.Size(shape).numel() for name, shape in written.items() if ".experts." in name)
    if stacked != came:
        raise ModelError(f"{path} has {came:,} weights of experts, should have {stacked:,}", "get it anew")
