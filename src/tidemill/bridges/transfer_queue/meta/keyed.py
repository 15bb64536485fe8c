"""KVBatchMeta: rows by key, with their tags. It behaves as TransferQueue's class does."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from tidemill.bridges.transfer_queue.meta.parts import check_length, even_parts, joined_info


@dataclass
class KVBatchMeta:
    """Rows by key, with their tags."""

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_length("tags", self.tags, len(self.keys))
        for name, values in (("keys", self.keys), ("fields", self.fields or [])):
            if len(values) != len(set(values)):
                raise ValueError(f"{name} of a KVBatchMeta must differ, got {values}")
        self.tags, self.extra_info = copy.deepcopy(self.tags), copy.deepcopy(self.extra_info)

    @property
    def size(self) -> int:
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __str__(self) -> str:
        return f"KVBatchMeta(size={self.size}, field_names={self.fields}, extra_info={self.extra_info})"

    def select_keys(self, keys_to_select: list[str]) -> KVBatchMeta:
        if len(set(keys_to_select)) != len(keys_to_select):
            raise ValueError(f"keys to select must differ, got {keys_to_select}")
        tags = dict(zip(self.keys, self.tags))
        missing = [key for key in keys_to_select if key not in tags]
        if missing:
            raise RuntimeError(f"keys {missing} are not in this batch")
        return self._with(keys_to_select, [tags[key] for key in keys_to_select])

    def reorder(self, indexes: Sequence[int]) -> None:
        """Put the rows in this order, in place."""
        if len(indexes) != self.size or len(set(indexes)) != self.size:
            raise ValueError(f"an order of {self.size} rows has each number once, got {indexes}")
        self.keys, self.tags = [self.keys[i] for i in indexes], [self.tags[i] for i in indexes]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """Split into parts that differ by one row at most."""
        parts = even_parts(self.size, chunks)
        return [self._with([self.keys[i] for i in part], [self.tags[i] for i in part]) for part in parts]

    def _with(self, keys: list[str], tags: list[dict[str, Any]]) -> KVBatchMeta:
        return KVBatchMeta(keys, tags, self.partition_id, self.fields, self.extra_info)

    @classmethod
    def concat(cls, data: Sequence[KVBatchMeta]) -> KVBatchMeta:
        """Return the rows of all, one behind another: of one partition, with the same fields."""
        parts = [part for part in data if part]
        if not parts:
            return cls()
        first = parts[0]
        for part in parts:
            if part.fields is not None and set(part.fields) != set(first.fields or ()):
                raise ValueError(f"batches with different fields cannot be joined: {first.fields} and {part.fields}")
            if part.partition_id != first.partition_id:
                raise ValueError(f"batches of {first.partition_id!r} and {part.partition_id!r} cannot be joined")
        info = joined_info([part.extra_info or {} for part in parts])
        keys, tags = (list(chain.from_iterable(getattr(part, name) for part in parts)) for name in ("keys", "tags"))
        return cls(keys, tags, first.partition_id, first.fields, info or None)
