"""BatchMeta: rows by number, with their fields. It behaves as TransferQueue's class does."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.bridges.transfer_queue.meta.parts import check_length, even_parts, joined_info
from tidemill.bridges.transfer_queue.meta.schema import Schema, schema_of

Status = npt.NDArray[np.int8]


class BatchMeta:
    """Rows by number, what their fields are like, which of them are ready, and what users noted of each."""

    __slots__ = (
        "_custom_backend_meta",
        "_field_names",
        "_is_ready",
        "_size",
        "custom_meta",
        "extra_info",
        "field_schema",
        "global_indexes",
        "partition_ids",
        "production_status",
    )

    def __init__(
        self,
        global_indexes: Sequence[int],
        partition_ids: Sequence[str],
        field_schema: Mapping[str, Mapping[str, Any]] | None = None,
        production_status: Any = None,
        extra_info: Mapping[str, Any] | None = None,
        custom_meta: Sequence[Mapping[str, Any]] | None = None,
        _custom_backend_meta: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.global_indexes, self.partition_ids = list(global_indexes), list(partition_ids)
        n = self._size = len(self.global_indexes)
        check_length("partition_ids", self.partition_ids, n)
        self.field_schema: Schema = {name: dict(kind) for name, kind in (field_schema or {}).items()}
        for name, kind in self.field_schema.items():
            if kind.get("per_sample_shapes") is not None:
                check_length(f"per_sample_shapes of {name!r}", kind["per_sample_shapes"], n)
        if production_status is None:
            self.production_status: Status = np.zeros(n, np.int8)
        else:
            self.production_status = np.array(production_status, np.int8)
            check_length("production_status", self.production_status, n)
        self.extra_info = dict(extra_info or {})
        self.custom_meta = _maps(custom_meta, n, "custom_meta")
        self._custom_backend_meta = _maps(_custom_backend_meta, n, "_custom_backend_meta")
        self._refresh()

    def _refresh(self) -> None:
        self._field_names = sorted(self.field_schema)
        self._is_ready = self._size > 0 and bool((self.production_status == 1).all())

    def __getstate__(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        for name, value in zip(self.__slots__, state):
            is_frozen = isinstance(value, np.ndarray) and not value.flags.writeable  # Ray shares arrays read-only
            setattr(self, name, value.copy() if is_frozen else value)

    @classmethod
    def empty(cls, extra_info: Mapping[str, Any] | None = None) -> BatchMeta:
        return cls([], [], extra_info=extra_info)

    # -- looking -----------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return self._size

    @property
    def field_names(self) -> list[str]:
        return self._field_names

    @property
    def is_ready(self) -> bool:
        """Whether there are rows, and all have been written."""
        return self._is_ready

    @property
    def samples(self) -> SampleViews:
        return SampleViews(self)

    def get_dtypes(self, field_name: str) -> list[Any]:
        return [self._kind(field_name).get("dtype")] * self._size

    def get_shapes(self, field_name: str) -> list[Any]:
        kind = self._kind(field_name)
        shapes = kind.get("per_sample_shapes")
        return [kind.get("shape")] * self._size if shapes is None else list(shapes)

    def _kind(self, name: str) -> dict[str, Any]:
        if name not in self.field_schema:
            raise KeyError(f"no field {name!r} in the field_schema; it has {', '.join(self.field_schema) or 'none'}")
        return self.field_schema[name]

    def __len__(self) -> int:
        return self._size

    def __str__(self) -> str:
        return (
            f"BatchMeta(size={self.size}, field_names={self.field_names}, is_ready={self.is_ready}, "
            f"global_indexes={self.global_indexes}, extra_info={self.extra_info})"
        )

    # -- what users note ---------------------------------------------------------------------------------------------

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        self.extra_info[key] = value

    def get_all_extra_info(self) -> dict[str, Any]:
        return copy.deepcopy(self.extra_info)

    def update_extra_info(self, info_dict: Mapping[str, Any]) -> None:
        self.extra_info.update(info_dict)

    def remove_extra_info(self, key: str) -> Any:
        return self.extra_info.pop(key, None)

    def clear_extra_info(self) -> None:
        self.extra_info.clear()

    def has_extra_info(self, key: str) -> bool:
        return key in self.extra_info

    def get_all_custom_meta(self) -> list[dict[str, Any]]:
        return copy.deepcopy(self.custom_meta)

    def update_custom_meta(self, custom_meta: Sequence[Mapping[str, Any]] | None) -> None:
        if custom_meta is None:
            return
        check_length("custom_meta", custom_meta, self._size)
        for known, new in zip(self.custom_meta, custom_meta):
            known.update(new)

    def clear_custom_meta(self) -> None:
        self.custom_meta = [{} for _ in range(self._size)]

    # -- changing ----------------------------------------------------------------------------------------------------

    def add_fields(self, tensor_dict: Any, set_all_ready: bool = True) -> BatchMeta:
        """Note that these fields are written for all rows, in place."""
        n = tensor_dict.batch_size[0]
        if n == 0:
            return self
        if n != self._size:
            raise ValueError(f"fields of {n} rows cannot be added to a BatchMeta of {self._size}")
        self.field_schema.update(schema_of(tensor_dict))
        if set_all_ready:
            self.production_status[:] = 1
        self._refresh()
        return self

    def reorder(self, indices: Sequence[int]) -> None:
        """Put the rows in this order, in place."""
        if sorted(indices) != list(range(self._size)):
            raise ValueError(f"an order of {self._size} rows has each number below {self._size} once, got {indices}")
        chosen = self.select_samples(list(indices))
        self.global_indexes, self.partition_ids = chosen.global_indexes, chosen.partition_ids
        self.field_schema, self.production_status = chosen.field_schema, chosen.production_status
        self.custom_meta, self._custom_backend_meta = chosen.custom_meta, chosen._custom_backend_meta

    # -- others made of it -------------------------------------------------------------------------------------------

    def select_samples(self, sample_indices: Sequence[int]) -> BatchMeta:
        if any(not 0 <= i < self._size for i in sample_indices):
            raise ValueError(f"rows must be from 0 to {self._size - 1}, got {list(sample_indices)}")

        def picked(values: Sequence[Any]) -> list[Any]:
            return [copy.deepcopy(values[i]) for i in sample_indices]

        schema = copy.deepcopy({k: {n: v for n, v in s.items() if n != "per_sample_shapes"} for k, s in self._kinds()})
        for name, kind in self._kinds():
            if kind.get("per_sample_shapes") is not None:
                schema[name]["per_sample_shapes"] = [kind["per_sample_shapes"][i] for i in sample_indices]
        return BatchMeta(
            picked(self.global_indexes),
            picked(self.partition_ids),
            schema,
            self.production_status[list(sample_indices)],
            self.extra_info,
            picked(self.custom_meta),
            picked(self._custom_backend_meta),
        )

    def _kinds(self) -> list[tuple[str, dict[str, Any]]]:
        return list(self.field_schema.items())

    def select_fields(self, field_names: Sequence[str]) -> BatchMeta:
        """Return the same rows with those of these fields that there are."""
        chosen = self.copy()
        chosen.field_schema = {name: chosen.field_schema[name] for name in field_names if name in chosen.field_schema}
        chosen._custom_backend_meta = [
            {name: value for name, value in meta.items() if name.startswith("_") or name in field_names}
            for meta in chosen._custom_backend_meta
        ]
        chosen._refresh()
        return chosen

    def copy(self) -> BatchMeta:
        return BatchMeta(
            self.global_indexes,
            self.partition_ids,
            copy.deepcopy(self.field_schema),
            self.production_status,
            copy.deepcopy(self.extra_info),
            copy.deepcopy(self.custom_meta),
            copy.deepcopy(self._custom_backend_meta),
        )

    def __getitem__(self, item: Any) -> BatchMeta:
        if isinstance(item, slice):
            return self.select_samples(range(*item.indices(self._size)))
        if not isinstance(item, int | np.integer):
            raise TypeError(f"a BatchMeta is indexed by numbers and slices, not by {type(item).__name__}")
        place = int(item) + (self._size if item < 0 else 0)
        if not 0 <= place < self._size:
            raise IndexError(f"row {item} of a BatchMeta with {self._size} rows")
        return self.select_samples([place])

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """Split into parts that differ by one row at most."""
        return [self.select_samples(part) for part in even_parts(self._size, chunks)]

    def chunk_by_partition(self) -> list[BatchMeta]:
        places: dict[str, list[int]] = {}
        for place, name in enumerate(self.partition_ids):
            places.setdefault(name, []).append(place)
        return [self.select_samples(rows) for rows in places.values()]

    def union(self, other: BatchMeta) -> BatchMeta:
        """Return the same rows with the fields of both. A row is ready where both say so."""
        if not other or not self._size:
            return (self if self._size or not other else other).copy()
        for name in ("global_indexes", "partition_ids"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(f"the union of two BatchMeta needs the same {name}: {self} and {other}")
        mine, theirs = self.copy(), other.copy()
        return BatchMeta(
            mine.global_indexes,
            mine.partition_ids,
            {**mine.field_schema, **theirs.field_schema},
            mine.production_status & theirs.production_status,
            {**mine.extra_info, **theirs.extra_info},
            [{**a, **b} for a, b in zip(mine.custom_meta, theirs.custom_meta)],
            [{**a, **b} for a, b in zip(mine._custom_backend_meta, theirs._custom_backend_meta)],
        )

    @classmethod
    def concat(cls, data: Sequence[BatchMeta], validate: bool = True) -> BatchMeta:
        """Return the rows of all, one behind another. They must have the same fields."""
        parts = [part for part in data if part]
        if not parts:
            return cls.empty()
        if validate:
            _check_same_fields(parts)
        return cls(
            list(chain.from_iterable(part.global_indexes for part in parts)),
            list(chain.from_iterable(part.partition_ids for part in parts)),
            {name: _joined_kind(name, parts) for name in parts[0].field_schema},
            np.concatenate([part.production_status for part in parts]),
            joined_info([part.extra_info for part in parts]),
            list(chain.from_iterable(part.custom_meta for part in parts)),
            list(chain.from_iterable(part._custom_backend_meta for part in parts)),
        )


class SampleViews:
    """The rows of a BatchMeta one by one, made when they are looked at."""

    def __init__(self, batch: BatchMeta) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return self._batch.size

    def __getitem__(self, place: int) -> SampleView:
        return SampleView(self._batch, place)

    def __iter__(self) -> Iterator[SampleView]:
        return (SampleView(self._batch, place) for place in range(len(self)))


@dataclass(frozen=True, repr=False)
class SampleView:
    """One row of a BatchMeta, to read."""

    _batch: BatchMeta
    _place: int

    @property
    def global_index(self) -> int:
        return self._batch.global_indexes[self._place]

    @property
    def partition_id(self) -> str:
        return self._batch.partition_ids[self._place]

    @property
    def production_status(self) -> int:
        return int(self._batch.production_status[self._place])

    @property
    def custom_meta(self) -> MappingProxyType[str, Any]:
        return MappingProxyType(self._batch.custom_meta[self._place])

    @property
    def fields(self) -> MappingProxyType[str, MappingProxyType[str, Any]]:
        """What each field is like in this row."""
        found = {}
        for name, kind in self._batch.field_schema.items():
            own = dict(kind)
            shapes = own.pop("per_sample_shapes", None)
            if shapes is not None:
                own["shape"] = shapes[self._place]
            found[name] = MappingProxyType(own)
        return MappingProxyType(found)

    def __repr__(self) -> str:
        return (
            f"SampleView(global_index={self.global_index}, partition_id={self.partition_id!r}, "
            f"production_status={self.production_status}, fields={list(self._batch.field_schema)})"
        )


def _maps(given: Sequence[Mapping[str, Any]] | None, n: int, what: str) -> list[dict[str, Any]]:
    if not given:
        return [{} for _ in range(n)]
    check_length(what, given, n)
    return [dict(one) for one in given]


def _check_same_fields(parts: Sequence[BatchMeta]) -> None:
    first = parts[0]
    for i, part in enumerate(parts):
        if part.field_names != first.field_names:
            raise ValueError(f"part {i} has the fields {part.field_names}, the first one {first.field_names}")
        for name in first.field_names:
            mine, theirs = first.field_schema[name].get("dtype"), part.field_schema[name].get("dtype")
            if mine != theirs:
                raise ValueError(f"field {name!r} is {mine} in the first part and {theirs} in part {i}")


def _joined_kind(name: str, parts: Sequence[BatchMeta]) -> dict[str, Any]:
    kinds = [part.field_schema.get(name, {}) for part in parts]
    first, is_nested = kinds[0], any(kind.get("is_nested") for kind in kinds)
    joined = {
        "dtype": first.get("dtype"),
        "shape": None if is_nested else first.get("shape"),
        "is_nested": is_nested,
        "is_non_tensor": first.get("is_non_tensor", False),
    }
    if is_nested or any(kind.get("per_sample_shapes") for kind in kinds):
        shapes = [kind.get("per_sample_shapes") or [kind.get("shape")] * part.size for kind, part in zip(kinds, parts)]
        joined["per_sample_shapes"] = list(chain.from_iterable(shapes))
    return joined
