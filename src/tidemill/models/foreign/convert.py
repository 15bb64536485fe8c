"""Import a checkpoint of another framework: its weights as a Hugging Face folder that `model.path` opens.

Known: verl's FSDP checkpoints, Megatron-core's distributed checkpoints, torch's distributed checkpoints of a
transformers model (accelerate, FSDP2), and adapters in peft's format. Optimizer and step stay behind: a new run begins
with its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tidemill.errors import ModelError
from tidemill.models.box.find import resolve
from tidemill.models.foreign import adapter, megatron, verl
from tidemill.models.foreign.sharded import INDEX, ShardedTensors
from tidemill.models.foreign.write import check_whole, dtype_of, new_folder, write_weights

LATEST = "latest_checkpointed_iteration.txt"  # Megatron's, in the folder of all checkpoints
INSIDE = ("actor", "dist_ckpt", "pytorch_model_fsdp_0", "model")  # where a checkpoint lies in what a step saved
DEFINITION = "huggingface"  # where verl keeps config.json and the tokenizer


@dataclass(frozen=True, slots=True)
class Imported:
    folder: Path
    source: Path
    kind: str
    architecture: str
    parameters: int


def import_checkpoint(path: Path, folder: Path, *, dtype: str = "float32", definition: Path | None = None) -> Imported:
    """Write the checkpoint's model as `folder`. `definition`: a folder with config.json and tokenizer, for a checkpoint
    that has none beside it."""
    kind = dtype_of(dtype)
    source = find(path)
    own = definition or _definition_of(source)
    try:
        config = AutoConfig.from_pretrained(own)
        with torch.device("meta"):
            module: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ModelError(f"{own}: transformers cannot open its config.json: {error}") from error
    with new_folder(folder) as aside:
        for file in own.iterdir():
            if file.is_file() and file.suffix not in (".safetensors", ".bin", ".pt"):
                shutil.copyfile(file, aside / file.name)
        config.dtype = kind
        config.save_pretrained(aside)
        form, found = opened(source, config, own)
        written = write_weights(_without_tied(found, module), aside, kind)
        check_whole(source, module, written)
    count = sum(torch.Size(shape).numel() for shape in written.values())
    return Imported(folder, source, form, type(module).__name__, count)


def find(path: Path) -> Path:
    """Find the checkpoint itself in the folder that a step saved."""
    if not path.is_dir():
        raise ModelError(f"{path} is no folder", "name the folder of a checkpoint, or a .gguf file")
    if (path / LATEST).exists():
        newest = (path / LATEST).read_text().strip()
        return find(path / (newest if newest == "release" else f"iter_{int(newest):07d}"))
    if (path / INDEX).exists() or (path / adapter.SETTINGS).exists() or verl.files(path):
        return path
    if (path / "config.json").exists():
        raise ModelError(f"{path} is a Hugging Face folder already", f"use it as it is: model.path={path}")
    for name in INSIDE:
        if (path / name).is_dir():
            return find(path / name)
    raise ModelError(
        f"{path} holds no checkpoint that is known",
        f"known: model_world_size_W_rank_R.pt (verl), a folder with {INDEX} (Megatron-core, accelerate, FSDP2), "
        f"{adapter.SETTINGS} (peft)",
    )


def opened(source: Path, config: Any, base: Path) -> tuple[str, Iterable[tuple[str, Tensor]]]:
    if (source / adapter.SETTINGS).exists():
        return f"adapters of {base}", adapter.merged(source, base)
    if ranks := verl.files(source):
        return f"verl, {len(ranks)} ranks", verl.tensors(ranks)
    found = ShardedTensors(source)
    if megatron.is_one(list(found.known)):
        return "Megatron-core", megatron.tensors(found, config)
    names = {name: _plain(name, found.known) for name in found.known if not name.startswith("optim")}
    return "torch's distributed checkpoint", ((own, found.read(name)) for name, own in names.items())


def _plain(name: str, known: Iterable[str]) -> str:
    """Leave out the wrapper's name where all names have it: accelerate's checkpoints hold {"model": …}."""
    has_wrapper = any(n.startswith("model.model.") for n in known)
    return name.removeprefix("model.") if has_wrapper else name


def _without_tied(found: Iterable[tuple[str, Tensor]], module: Any) -> Iterable[tuple[str, Tensor]]:
    """Leave out copies of a tied output layer: a folder holds it once."""
    own = {name for name, _ in module.named_parameters()}
    every = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return ((name, tensor) for name, tensor in found if name not in every - own)


def _definition_of(source: Path) -> Path:
    if (source / adapter.SETTINGS).exists():
        return resolve(str(adapter.settings_of(source)["base_model_name_or_path"]))
    for place in (source / DEFINITION, source.parent / DEFINITION, source, source.parent):
        if (place / "config.json").exists():
            return place
    raise ModelError(f"{source} has no config.json beside it", "--definition FOLDER names the model that was trained")
