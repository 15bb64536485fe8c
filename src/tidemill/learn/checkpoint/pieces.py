"""Which boxes of which tensors a rank writes, and the files they lie in.

Files are safetensors, written front to back from the tensors' own memory. The manifest says which box of which tensor
lies where. torch.distributed.checkpoint shards as this does, but describes its files by a pickle and checks none.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tidemill.learn.checkpoint.folders import Saving, explain, write_file
from tidemill.learn.checkpoint.tensor_file import Form, form, head, in_order, raw
from tidemill.reshard.layouts.layout import Box, Layout, LayoutEntry, volume

SHARD_BYTES = 2_000_000_000
OF = re.compile(r"^(?P<role>critic\.)?(?P<kind>model|adapter|ema|averaged|optimizer)\.(?P<name>.+)$")


# Whose boxes


def own_box(name: str, tensor: Tensor, layout: Layout, rank: int) -> Box | None:
    """What of the logical tensor this rank is to write, or None."""
    entry = entry_of(name, layout)
    if entry is None or not tensor.ndim:  # a scalar beside a parameter, or something every rank has whole
        writer = min(entry.mesh.ranks) if entry is not None else layout.ranks[0]
        return tuple((0, n) for n in tensor.shape) if rank == writer else None
    mine = next((entry.home_box(c) for c, r in entry.mesh.coordinates() if r == rank), None)
    if mine is None or not volume(mine):
        return None
    holders = [r for c, r in entry.mesh.coordinates() if entry.home_box(c) == mine]
    return mine if rank == holders[sum(map(ord, name)) % len(holders)] else None  # each writes some


def entry_of(name: str, layout: Layout) -> LayoutEntry | None:
    """Of `model.NAME` (or `adapter`, `ema`, `averaged`) or `optimizer.NAME.KEY`, perhaps another role's:
    `critic.model.NAME`. A reference has weights alone, `reference.NAME`, which the layout calls so too."""
    if name in layout.by_name:
        return layout.by_name[name][0]
    of = OF.match(name)
    if of is None:
        return None
    own = of["name"].rpartition(".")[0] if of["kind"] == "optimizer" else of["name"]
    found = layout.by_name.get(f"{of['role'] or ''}{own}")
    return found[0] if found else None


# Files


def save_whole(job: Saving, tensors: Mapping[str, Tensor]) -> Path:
    """All of a checkpoint by this process, which has every tensor whole: nothing is copied on the way."""
    try:
        job.begin()
        boxes = {name: tuple((0, n) for n in t.shape) for name, t in tensors.items()}
        files = [_as_they_lie(tensors, names) for names in in_shards(tensors)]
        job.finish([write_pieces(job.aside, 0, files, boxes)])
    finally:
        shutil.rmtree(job.aside, ignore_errors=True)
    return job.target


@dataclass(frozen=True, slots=True)
class PieceFile:
    """One file: the tensors' forms, in the order of their bytes."""

    forms: dict[str, Form]
    bytes_of: Iterable[memoryview]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.forms.values())


def _as_they_lie(tensors: Mapping[str, Tensor], names: Iterable[str]) -> PieceFile:
    forms = ordered({name: form(tensors[name]) for name in names})
    return PieceFile(forms, (raw(tensors[name]) for name in forms))


def ordered(forms: Mapping[str, Form]) -> dict[str, Form]:
    return {name: forms[name] for name in in_order(forms)}


def in_shards(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names of the tensors that share a file."""
    shard: list[str] = []
    size = 0
    for name in sorted(tensors):
        if shard and size + tensors[name].nbytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += tensors[name].nbytes
    if shard:
        yield shard


def write_pieces(folder: Path, rank: int, made: Sequence[PieceFile], boxes: Mapping[str, Box]) -> dict[str, Any]:
    """A rank's files, with their checksums and what lies in them."""
    files: dict[str, Any] = {}
    pieces: dict[str, list[tuple[str, str, Box]]] = {}  # tensor → file, key, box
    for i, one in enumerate(made):
        name = f"rank-{rank:05d}-{i + 1:03d}.safetensors"
        try:
            files[name] = write_file(folder / name, chain([head(one.forms)], one.bytes_of))
        except OSError as error:
            raise explain(error, folder.parent, sum(one.nbytes for one in made)) from error
        for key in one.forms:
            pieces.setdefault(key, []).append((name, key, boxes[key]))
    return {"files": files, "tensors": pieces}


# Copies that training does not touch


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one rank writes. The memory is kept from one save to the next: touching it anew costs more than copying."""

    forms: dict[str, Form]  # of all this rank's tensors, those that others write included
    files: list[PieceFile]
    places: dict[str, Tensor]  # views of the files' memory
    boxes: dict[str, Box]

    @staticmethod
    def room(tensors: Mapping[str, Tensor], layout: Layout, rank: int) -> Snapshot:
        """Room for this rank's share, still empty. Of several ranks that hold the same piece one writes it."""
        found = {name: own_box(name, tensor, layout, rank) for name, tensor in tensors.items()}
        boxes = {name: box for name, box in found.items() if box is not None}
        is_pinned = any(t.device.type != "cpu" for t in tensors.values())
        files, places = list[PieceFile](), dict[str, Tensor]()
        for names in in_shards({name: tensors[name] for name in boxes}):
            forms = ordered({name: form(tensors[name]) for name in names})
            memory = torch.empty(sum(one.nbytes for one in forms.values()), dtype=torch.uint8, pin_memory=is_pinned)
            at = 0
            for name, one in forms.items():
                places[name] = memory[at : at + one.nbytes].view(one.dtype).view(one.shape)
                at += one.nbytes
            files.append(PieceFile(forms, [raw(memory)]))
        return Snapshot(forms_of(tensors), files, places, boxes)

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        for name, place in self.places.items():
            place.copy_(tensors[name], non_blocking=True)
        if any(t.device.type != "cpu" for t in tensors.values()):
            torch.accelerator.synchronize()


def forms_of(tensors: Mapping[str, Tensor]) -> dict[str, Form]:
    return {name: form(tensor) for name, tensor in tensors.items()}
