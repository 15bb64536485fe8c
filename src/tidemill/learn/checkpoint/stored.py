"""Tensors on disk as pieces of logical tensors, read by box: whatever ranks wrote them, any rank reads what it needs.

Two kinds of folders are read: a checkpoint (`manifest.json` says which box of which tensor lies where) and a Hugging
Face model. Only the bytes asked for are read, so no rank ever holds the whole model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tidemill.errors import CheckpointError, ModelError
from tidemill.learn.checkpoint.tensor_file import DTYPES
from tidemill.reshard.layouts.layout import Box, Shape, extents, intersect, volume

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
EXPERT = re.compile(r"^(?P<before>.*\.experts)\.(?P<index>\d+)\.(?P<kind>gate|up|down)_proj\.weight$")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`box` of a logical tensor is the tensor `key` of `file`, whose leading dimensions of size 1 may be missing."""

    file: str
    key: str
    box: Box


class StoredSource:
    """Logical tensors of one folder. A context manager: files stay open while it is used."""

    def __init__(self, folder: Path, pieces: Mapping[str, list[StoredTensor]]) -> None:
        self.folder, self.pieces = folder, pieces
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> StoredSource:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self.pieces

    def renamed(self, before: str, after: str) -> StoredSource:
        """Those of its tensors whose names begin with `before`, under names that begin with `after`."""
        kept = {n: found for n, found in self.pieces.items() if n.startswith(before)}
        return StoredSource(self.folder, {f"{after}{n.removeprefix(before)}": found for n, found in kept.items()})

    def shape(self, name: str) -> Shape:
        boxes = [p.box for p in self.pieces[name]]
        return tuple(max(box[d][1] for box in boxes) for d in range(len(boxes[0])))

    def dtype(self, name: str) -> torch.dtype:
        first = self.pieces[name][0]
        return DTYPES[self._file(first.file).get_slice(first.key).get_dtype()]

    def read_into(self, target: Tensor, name: str, box: Box) -> None:
        """Fill `target`, which is `box` of the logical tensor."""
        if name not in self.pieces:
            raise CheckpointError(f"{self.folder} has no tensor {name}", "it was written for another model")
        wanted = volume(box)
        for piece in self.pieces[name]:
            common = intersect(box, piece.box) if box else ()
            if common is None:
                continue
            place = tuple(slice(low - b0, high - b0) for (low, high), (b0, _) in zip(common, box))
            target[place] = self._read(piece, common).reshape(extents(common)).to(target)
            wanted -= volume(common)
            if wanted <= 0:
                return
        if wanted > 0:
            raise CheckpointError(f"{self.folder} lacks a part of {name}", "resume from an older checkpoint")

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A whole tensor."""
        out = torch.empty(self.shape(name), dtype=dtype or self.dtype(name))
        self.read_into(out, name, tuple((0, n) for n in out.shape))
        return out

    def _read(self, piece: StoredTensor, common: Box) -> Tensor:
        stored = self._file(piece.file).get_slice(piece.key)
        inside = [slice(low - b0, high - b0) for (low, high), (b0, _) in zip(common, piece.box)]
        inside = inside[len(inside) - len(stored.get_shape()) :]
        found: Tensor = stored[tuple(inside)] if inside else self._file(piece.file).get_tensor(piece.key)
        return found

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = self._stack.enter_context(safe_open(self.folder / name, "pt"))
            except Exception as error:  # safetensors has its own types
                raise CheckpointError(f"{self.folder / name} cannot be read: {error}") from error
        return self._open[name]


class HeldSource(StoredSource):
    """Whole tensors that this process has in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        boxes = {name: tuple((0, n) for n in t.shape) for name, t in tensors.items()}
        super().__init__(Path(), {name: [StoredTensor("", name, box)] for name, box in boxes.items()})
        self.tensors = tensors

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def _read(self, piece: StoredTensor, common: Box) -> Tensor:
        return self.tensors[piece.key][tuple(slice(low, high) for low, high in common)]


def from_manifest(folder: Path, manifest: Mapping[str, Any]) -> StoredSource:
    """A checkpoint that ranks wrote."""
    pieces = {
        name: [StoredTensor(file, key, tuple((int(a), int(b)) for a, b in box)) for file, key, box in found]
        for name, found in manifest["tensors"].items()
    }
    return StoredSource(folder, pieces)


class HuggingFace(StoredSource):
    """A model folder. Experts that lie there one by one are parts of the stacked tensor that the module has."""

    def __init__(self, folder: Path) -> None:
        found: dict[str, list[StoredTensor]] = {}
        super().__init__(folder, found)
        for key, file in _keys(folder).items():
            shape = tuple(self._file(file).get_slice(key).get_shape())
            name, box = logical(key, shape)
            found.setdefault(name, []).append(StoredTensor(file, key, box))


def logical(key: str, shape: Shape) -> tuple[str, Box]:
    """The tensor of the module that a tensor of the file is, or is a part of."""
    expert = EXPERT.match(key)
    if expert is None:
        return key, tuple((0, n) for n in shape)
    index = int(expert["index"])
    if expert["kind"] == "down":
        return f"{expert['before']}.down_proj", ((index, index + 1), *((0, n) for n in shape))
    first = shape[0] if expert["kind"] == "up" else 0
    return f"{expert['before']}.gate_up_proj", ((index, index + 1), (first, first + shape[0]), (0, shape[1]))


def _keys(folder: Path) -> dict[str, str]:
    if (folder / INDEX).exists():
        found: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return found
    if not (folder / SINGLE).exists():
        raise ModelError(f"{folder} has no *.safetensors", "copy the model's weights into it")
    with safe_open(folder / SINGLE, "pt") as file:
        return dict.fromkeys(file.keys(), SINGLE)
