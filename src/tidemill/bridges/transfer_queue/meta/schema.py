"""What fields of a TensorDict are like, in TransferQueue's words and in the dock's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tidemill.dock.keyed.partition import FieldKind

Schema = dict[str, dict[str, Any]]


def schema_of(data: Any) -> Schema:
    """Describe each field: dtype, shape of a row, is it nested, is it no tensor, and of nested ones every shape."""
    n = data.batch_size[0]
    return {name: _kind_of(name, value, n) for name, value in data.items()} if n else {}


def _kind_of(name: str, value: Any, n: int) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor):
        if len(value) != n:
            raise ValueError(f"field {name!r} has {len(value)} rows, not {n}")
        return {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
    if value.is_nested:
        shapes = shapes_of(value)
        if len(shapes) != n:
            raise ValueError(f"field {name!r} is nested of {len(shapes)} tensors, not {n}")
        told = {"dtype": value.dtype, "shape": torch.Size(shapes[0]), "is_nested": True, "is_non_tensor": False}
        return {**told, "per_sample_shapes": shapes}
    if value.shape[0] != n:
        raise ValueError(f"field {name!r} has {value.shape[0]} rows, not {n}")
    shape = value.shape[1:] if value.dim() > 1 else torch.Size([1])  # a number counts as a row of one
    return {"dtype": value.dtype, "shape": shape, "is_nested": False, "is_non_tensor": False}


def shapes_of(nested: Any) -> list[tuple[int, ...]]:
    if is_simple(nested):
        tail = tuple(nested.values().shape[1:])
        return [(length, *tail) for length in nested.offsets().diff().tolist()]
    return [tuple(row.shape) for row in nested.unbind()]


def jagged_offsets(nested: Any) -> torch.Tensor:
    offsets: torch.Tensor = nested.offsets()
    return offsets


def is_simple(nested: Any) -> bool:
    """Say whether a nested tensor is one run of values, ragged in its first dimension."""
    if nested.layout != torch.jagged or getattr(nested, "_ragged_idx", 0) != 1 or nested.lengths() is not None:
        return False
    offsets = nested.offsets()
    return bool(offsets[0] == 0) and int(offsets[-1]) == len(nested.values())


def to_kinds(schema: Mapping[str, Mapping[str, Any]]) -> list[FieldKind]:
    """The dock's words for a schema."""
    return [_to_kind(name, kind) for name, kind in schema.items()]


def _to_kind(name: str, kind: Mapping[str, Any]) -> FieldKind:
    shape, shapes = kind["shape"], kind.get("per_sample_shapes")
    dtype = None if kind["is_non_tensor"] else name_of(kind["dtype"])
    rows = None if shapes is None else [list(row) for row in shapes]
    return FieldKind(name, dtype, kind["is_nested"], None if shape is None else tuple(shape), rows)


def to_schema(kinds: Sequence[FieldKind]) -> Schema:
    """TransferQueue's words for what the dock tells."""
    return {kind.name: _to_schema(kind) for kind in kinds}


def _to_schema(kind: FieldKind) -> dict[str, Any]:
    dtype = None if kind.dtype is None else getattr(torch, kind.dtype)
    shape = None if kind.shape is None else torch.Size(kind.shape)
    told = {"dtype": dtype, "shape": shape, "is_nested": kind.is_nested, "is_non_tensor": kind.is_object}
    return told if kind.shapes is None else {**told, "per_sample_shapes": [tuple(shape) for shape in kind.shapes]}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
