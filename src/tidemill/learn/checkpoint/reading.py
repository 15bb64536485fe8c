"""Reading checkpoints by box: a rank reads what it has of each tensor, whatever layout wrote them.

Checkpoints that one process wrote before there were boxes (no `tensors` in their manifest) are read as boxes that are
whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tidemill.errors import CheckpointError
from tidemill.learn.checkpoint.folders import STATE, read_manifest
from tidemill.learn.checkpoint.pieces import entry_of
from tidemill.learn.checkpoint.stored import StoredSource, from_manifest
from tidemill.learn.optim.adam import SCALE, decode
from tidemill.reshard.layouts.layout import Box, Layout


def load_whole(path: Path, prefixes: Sequence[str] = ()) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        source, state = open_checkpoint(path)
        with source:
            names = [name for name in source.pieces if not prefixes or name.startswith(tuple(prefixes))]
            return {name: source.read(name) for name in names}, state
    except Exception as error:  # safetensors raises its own types for a broken file
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} cannot be read: {why}", "resume from an older checkpoint") from error


def open_checkpoint(path: Path) -> tuple[StoredSource, dict[str, Any]]:
    """Its tensors, to be read by box, and its state."""
    manifest = read_manifest(path)
    state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    if "tensors" not in manifest:
        return _whole_tensors(path, manifest), state
    return from_manifest(path, manifest), state


def _whole_tensors(path: Path, manifest: Mapping[str, Any]) -> StoredSource:
    """A checkpoint that one rank wrote."""
    pieces: dict[str, Any] = {}
    for file in manifest["files"]:
        if file.endswith(".safetensors"):
            with safe_open(path / file, "pt") as found:
                for key in found.keys():  # noqa: SIM118  (no mapping, though it has keys)
                    shape = found.get_slice(key).get_shape()
                    pieces[key] = [(file, key, tuple((0, n) for n in shape))]
    return from_manifest(path, {"tensors": pieces})


@torch.no_grad()
def read_own(source: StoredSource, targets: Mapping[str, Tensor], layout: Layout, rank: int, prefix: str = "") -> None:
    """Fill this rank's tensors, whatever layout wrote them. `prefix`: what their names lack in comparison with a
    checkpoint's (`model.` for a plain model folder)."""
    for name, target in targets.items():
        if target.numel():
            source.read_into(target, name, held_box(f"{prefix}{name}", target, layout, rank))


def held_box(name: str, own: Tensor, layout: Layout, rank: int) -> Box:
    """What of the logical tensor this rank has."""
    entry = entry_of(name, layout)
    if entry is None or not own.ndim:
        return tuple((0, n) for n in own.shape)
    return next(entry.home_box(c) for c, r in entry.mesh.coordinates() if r == rank)


def read_states(
    source: StoredSource, own: Mapping[str, Tensor], layout: Layout, rank: int, role: str = ""
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The optimizer's state of each parameter's piece, as far as the checkpoint has it."""
    start, keys = f"{role}optimizer.", dict[str, list[str]]()
    for full in source.pieces:
        name, _, key = full.removeprefix(start).rpartition(".")
        if full.startswith(start) and name in own and not key.endswith(SCALE):
            keys.setdefault(name, []).append(key)
    for name, found in keys.items():
        yield name, {key: _read_state(source, f"{start}{name}", key, own[name], layout, rank) for key in found}


def _read_state(source: StoredSource, at: str, key: str, own: Tensor, layout: Layout, rank: int) -> Tensor:
    name = f"{at}.{key}"
    if f"{name}{SCALE}" in source:  # one rank's blocks: other cuts of the tensor have other blocks
        entry = entry_of(name, layout)
        assert entry is not None
        coded = {key: source.read(name), f"{key}{SCALE}": source.read(f"{name}{SCALE}")}
        box = held_box(name, own, layout, rank)
        return decode(coded, key, entry.shape)[tuple(slice(low, high) for low, high in box)].clone()
    shape = own.shape if source.pieces[name][0].box else torch.Size()
    target = torch.zeros(shape, dtype=source.dtype(name))
    read_own(source, {name: target}, layout, rank)
    return target
