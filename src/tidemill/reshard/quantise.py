"""Weights quantised on the way: whole numbers of 8 bits, or 8-bit floats, with one scale per row and group of columns.

A group lies whole on one rank, so every rank quantises what it holds by itself and the result does not depend on how
the learner's weights are cut. The scales are tensors of their own in the engine's layout, `NAME::scale`; the learner
has none: they are worked out as they are sent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from tidemill.errors import ReshardError
from tidemill.reshard.layout import Box, Layout, LayoutEntry, LayoutPiece, Part, Shape, Shard, extents, shift
from tidemill.reshard.plan import Spot, Transfer

SCALE = "::scale"
GROUP = 128
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


@dataclass(frozen=True, slots=True)
class Quantise:
    """How one logical tensor of a plan is read: its values, or their scales."""

    dtype: str
    group: int
    columns: int
    is_scale: bool = False

    def block(self, transfer: Transfer, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        held, box = transfer.held, transfer.box
        if self.is_scale:
            held, box = self._weight(held), self._columns(box)
        wide = self._whole_groups(box)
        view = _region(tensors, held, wide).float()
        padded = F.pad(view, (0, -view.shape[-1] % self.group))
        groups = padded.view(*padded.shape[:-1], -1, self.group)
        scale: torch.Tensor = groups.abs().amax(-1) / LARGEST[self.dtype]
        if self.is_scale:
            return scale
        scale = torch.where(scale > 0, scale, 1.0).unsqueeze(-1)
        scaled = groups / scale
        rounded = scaled.round() if self.dtype == "int8" else scaled
        values: torch.Tensor = rounded.flatten(-2).to(getattr(torch, self.dtype))
        first = box[-1][0] - wide[-1][0]
        return values[..., first : first + box[-1][1] - box[-1][0]]

    def _columns(self, box: Box) -> Box:
        """From groups to columns."""
        low, high = box[-1]
        return (*box[:-1], (low * self.group, min(high * self.group, self.columns)))

    def _weight(self, scales: LayoutPiece) -> LayoutPiece:
        home = scales.home.removesuffix(SCALE)
        at = (*scales.at[:-1], scales.at[-1] * self.group)
        return replace(scales, home=home, at=at, box=self._columns(scales.box))

    def _whole_groups(self, box: Box) -> Box:
        low, high = box[-1]
        return (*box[:-1], (low // self.group * self.group, min(-(-high // self.group) * self.group, self.columns)))


def quantised(
    source: Layout, target: Layout, names: Collection[str], *, dtype: str = "int8", group: int = GROUP
) -> tuple[Layout, Layout, dict[str, Quantise]]:
    """The two layouts with `names` quantised in the target, and how they are to be read (a `Job`'s `changes`)."""
    if dtype not in LARGEST:
        raise ReshardError(f"weights cannot be quantised to {dtype!r}", f"use {' or '.join(LARGEST)}")
    changes: dict[str, Quantise] = {}
    for name in names:
        columns = target.by_name[name][0].shape[-1]
        changes[name] = Quantise(dtype, group, columns)
        changes[name + SCALE] = Quantise(dtype, group, columns, is_scale=True)
    held = [_scales(e, group) for e in source.entries if e.name in names]
    wanted = [_scales(e, group) for e in target.entries if e.name in names]
    narrow = [replace(e, dtype=dtype) if e.name in names else e for e in target.entries]
    return (
        replace(source, entries=(*source.entries, *held)),
        replace(target, entries=(*narrow, *wanted)),
        changes,
    )


def dequantised(values: torch.Tensor, scale: torch.Tensor, group: int = GROUP) -> torch.Tensor:
    """What an engine computes with, in float32."""
    return values.float() * scale.repeat_interleave(group, -1)[..., : values.shape[-1]]


def _scales(entry: LayoutEntry, group: int) -> LayoutEntry:
    """The entry of a tensor's scales: cut as the tensor, its last dimension `group` times shorter."""
    last = len(entry.whole) - 1
    for place, size in zip(entry.places, entry.mesh.shape):
        parts = getattr(place, "parts", 0) or size
        if isinstance(place, Shard) and place.dim == last and entry.whole[-1] % (parts * group):
            raise ReshardError(
                f"{entry.name}: {entry.whole[-1]} columns in {parts} parts hold no whole groups of {group}",
                "choose a group that divides each part",
            )

    def shorter(shape: Shape) -> Shape:
        return (*shape[:-1], -(-shape[-1] // group)) if shape else shape

    part = entry.part
    if part is not None:
        part = Part(shorter(part.start), shorter(part.extent), shorter(part.at), shorter(part.whole))
    return replace(
        entry, name=entry.name + SCALE, home=entry.local + SCALE, dtype="float32", shape=shorter(entry.shape),
        part=part, ahead=shorter(entry.ahead),
    )  # fmt: skip


def _region(tensors: Mapping[str, torch.Tensor], held: LayoutPiece, box: Box) -> torch.Tensor:
    from tidemill.reshard.pack import region

    return region(tensors, Spot(held.home, shift(held.at, held.box, box)), extents(box))
