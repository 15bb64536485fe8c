"""Hugging Face folders in and out, streamed: no rank ever holds the whole model.

In: the model is made without memory, cut, and each rank reads its own boxes. Out: from a checkpoint on disk; each
rank writes some of the folder's files, one tensor in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tidemill.errors import ModelError
from tidemill.learn.checkpoint.folders import STATE
from tidemill.learn.checkpoint.reading import open_checkpoint
from tidemill.learn.checkpoint.stored import INDEX, SINGLE, StoredSource
from tidemill.learn.checkpoint.tensor_file import Form, head, raw
from tidemill.learn.ema import MEAN
from tidemill.models.mixture.routing import GIVEN
from tidemill.recipe import config as settings

FILE_BYTES = 4_000_000_000
# Their folders hold experts one by one, where the module has them stacked.
UNSTACKED = frozenset({"qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "olmoe", "glm4_moe"})


def empty_model(folder: Path, model: settings.ModelSettings) -> Any:
    """The module of a folder, on the meta device, with our attention plugged in."""
    from transformers import AutoConfig

    from tidemill.models.load import DTYPES as MODEL_DTYPES
    from tidemill.models.load import from_config

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
        with torch.device("meta"):
            module = from_config(config, trust_remote_code=model.trust_remote_code)
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"model.path={folder}: transformers cannot open it: {first}") from error
    return module.to(MODEL_DTYPES[model.dtype]).eval()


def materialise(model: Any, device: torch.device) -> None:
    """Give a model on the meta device memory; what it computes for itself (rotary frequencies) is computed again."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = getattr(head, "weight", None) is not None and head.weight is getattr(embedding, "weight", None)
    model.to_empty(device=device)
    if tied:
        head.weight = embedding.weight
    for module in model.modules():
        own = [name for name in module._non_persistent_buffers_set if name in module._buffers]
        if not own:
            continue
        if not hasattr(module, "config"):
            raise ModelError(f"{type(module).__name__} has values that cannot be made again", "see docs/models.md")
        fresh = type(module)(module.config)
        for name in own:
            module._buffers[name] = fresh._buffers[name].to(device)


# Out


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A tensor of the folder: a part of a logical tensor."""

    key: str
    name: str
    box: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    drops_lead: bool = False  # one expert of a stack

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(high - low for low, high in self.box)
        return shape[1:] if self.drops_lead else shape

    @property
    def form(self) -> Form:
        return Form(self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        return self.form.nbytes


def export(
    checkpoint: Path, folder: Path, definition: Path, rank: int = 0, ranks: int = 1, *, raw_weights: bool = False
) -> None:
    """Write a model folder from a checkpoint: of the weights' running mean, where one is kept and `raw_weights` are not
    asked for. `definition` holds config.json and the tokenizer. Every rank calls this and writes some of the files; the
    folder is complete when all have come back."""
    source, _ = open_checkpoint(checkpoint)
    raw = json.loads((definition / "config.json").read_text(encoding="utf-8"))
    with source:
        if any(name.startswith("adapter.") for name in source.pieces):
            raise ModelError(
                "the checkpoint holds adapters alone: their base model is elsewhere", "tidemill export RUN merges them"
            )
        if any(name.endswith(f".{GIVEN}") for name in source.pieces):
            raise ModelError(
                "experts are balanced by a bias on their choice, for which this model's folder has no place",
                "tidemill export RUN --without-bias writes the weights alone",
            )
        files = list(_files(list(outgoing(source, raw.get("model_type", ""), raw_weights))))
        folder.mkdir(parents=True, exist_ok=True)
        names = _names(len(files))
        for i in range(rank, len(files), ranks):
            _write_file(folder / names[i], files[i], source)
    if rank == 0:
        if len(files) > 1:
            weights = {out.key: name for name, outs in zip(names, files) for out in outs}
            total = sum(out.nbytes for outs in files for out in outs)
            index = {"metadata": {"total_size": total}, "weight_map": weights}
            (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
        for file in definition.iterdir():
            if file.is_file() and file.suffix != ".safetensors" and file.name not in (INDEX, STATE):
                (folder / file.name).write_bytes(file.read_bytes())


def outgoing(source: StoredSource, model_type: str, raw_weights: bool = False) -> Iterator[Outgoing]:
    for full in sorted(source.pieces):
        if not full.startswith("model."):
            continue
        name, shape, dtype = full.removeprefix("model."), source.shape(full), source.dtype(full)
        has_mean = f"{MEAN}{name}" in source.pieces
        full = f"{MEAN}{name}" if has_mean and not raw_weights else full
        if model_type in UNSTACKED and name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            yield from _unstacked(full, name, shape, dtype)
        else:
            yield Outgoing(name, full, tuple((0, n) for n in shape), dtype)


def _unstacked(full: str, name: str, shape: Sequence[int], dtype: torch.dtype) -> Iterator[Outgoing]:
    before, _, kind = name.rpartition(".")
    for e in range(shape[0]):
        if kind == "down_proj":
            box = ((e, e + 1), (0, shape[1]), (0, shape[2]))
            yield Outgoing(f"{before}.{e}.down_proj.weight", full, box, dtype, True)
            continue
        half = shape[1] // 2
        for part, low in (("gate", 0), ("up", half)):
            box = ((e, e + 1), (low, low + half), (0, shape[2]))
            yield Outgoing(f"{before}.{e}.{part}_proj.weight", full, box, dtype, True)


def _files(outs: list[Outgoing]) -> Iterator[list[Outgoing]]:
    held: list[Outgoing] = []
    for out in outs:
        if held and sum(o.nbytes for o in held) + out.nbytes > FILE_BYTES:
            yield held
            held = []
        held.append(out)
    if held:
        yield held


def _names(count: int) -> list[str]:
    return [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _write_file(path: Path, outs: list[Outgoing], source: StoredSource) -> None:
    """Front to back, one tensor in memory at a time."""
    with path.open("wb") as file:
        file.write(head({out.key: out.form for out in outs}))
        for out in outs:
            tensor = torch.empty([high - low for low, high in out.box], dtype=out.dtype)
            source.read_into(tensor, out.name, out.box)
            file.write(raw(tensor))
