"""TransferQueueClient: put, get and metadata by row number, as TransferQueue's client offers them, each also as a
coroutine. One round trip to the ledger a call; the bytes go through this node's shared memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from tidemill.bridges.transfer_queue.columns import chunk_of, rows_of
from tidemill.bridges.transfer_queue.gather import gathered, stacked
from tidemill.bridges.transfer_queue.meta.batch import BatchMeta
from tidemill.bridges.transfer_queue.meta.schema import schema_of, to_kinds, to_schema
from tidemill.bridges.transfer_queue.objects import packed, unpacked
from tidemill.bridges.transfer_queue.parse import parsed
from tidemill.dock.address import Address
from tidemill.dock.keyed.client import KeyedDock, Rows
from tidemill.dock.keyed.partition import Absent
from tidemill.dock.keyed.tags import NO_TAGS
from tidemill.errors import DockError

Parser = Callable[[Any], Any]
Status = tuple[torch.Tensor | None, torch.Tensor | None]


class StorageKeyNotFoundError(KeyError):
    """A value that was asked for is not stored: it was cleared, or never written."""


class TransferQueueClient:
    """Everything that a process does with the queue. Thread-safe."""

    def __init__(self, client_id: str, controller_info: Any, **_: Any) -> None:
        """`controller_info`: `controller.zmq_info` of the configuration that `init` returned."""
        if not isinstance(controller_info, str):
            raise TypeError(f"controller_info must be the zmq_info of a configuration, got {type(controller_info)}")
        self.client_id = client_id
        self._dock = KeyedDock(Address.from_json(controller_info))

    def initialize_storage_manager(self, manager_type: str, config: Any) -> None:
        """Do nothing: the dock's warehouses are the storage, whatever its name."""

    # -- writing -----------------------------------------------------------------------------------------------------

    def put(
        self,
        data: TensorDict,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: Parser | None = None,
    ) -> BatchMeta:
        """Write fields: to the rows of `metadata`, which is returned with them, or to new rows of a partition."""
        if metadata is None and partition_id is None:
            raise ValueError("put needs the metadata of rows, or a partition_id for new ones")
        if metadata is not None and not metadata:
            raise ValueError("put was given metadata without rows")
        schema = schema_of(data)
        n = data.batch_size[0]
        if metadata is not None and n != metadata.size:
            raise ValueError(f"put was given {n} rows of data for metadata of {metadata.size}")
        kinds, fields = to_kinds(schema), parsed(data, data_parser)
        if metadata is None:
            assert partition_id is not None
            rows = _told(lambda: self._dock.write(partition_id, rows=n, kinds=kinds, chunk=chunk_of(fields, n)))
            return _meta(partition_id, rows).add_fields(data)
        for name, places in _by_partition(metadata):
            part = fields if len(places) == n else _picked(data, places, data_parser)
            chosen = kinds if len(places) == n else to_kinds(schema_of(part))
            tags = [packed(metadata.custom_meta[i]) for i in places]
            indexes = np.array([metadata.global_indexes[i] for i in places], np.int64)
            chunk = chunk_of(part, len(places))
            _told(partial(self._dock.write, name, indexes=indexes, kinds=chosen, chunk=chunk, tags=tags))
        return metadata.add_fields(data)

    def set_custom_meta(self, metadata: BatchMeta) -> None:
        """Replace what is noted of these rows."""
        for name, places in _by_partition(metadata):
            indexes = np.array([metadata.global_indexes[i] for i in places], np.int64)
            self._dock.tag(name, indexes, [packed(metadata.custom_meta[i]) for i in places])

    def clear_samples(self, metadata: BatchMeta) -> None:
        for name, places in _by_partition(metadata):
            self._dock.clear(name, indexes=np.array([metadata.global_indexes[i] for i in places], np.int64))

    def clear_partition(self, partition_id: str) -> None:
        self._dock.clear(partition_id)

    # -- reading -----------------------------------------------------------------------------------------------------

    def get_meta(
        self,
        data_fields: list[str],
        batch_size: int,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: Mapping[str, Any] | None = None,
    ) -> BatchMeta:
        """Return metadata of rows: `fetch` gives a task ready rows that it has not had, and waits for them;
        `force_fetch` shows all rows; `insert` makes new ones."""
        if mode == "fetch":
            return self._fetch(data_fields, batch_size, partition_id, task_name, sampling_config or {})
        if mode == "force_fetch":
            return _meta(partition_id, _told(lambda: self._dock.look(partition_id, list(data_fields))))
        if mode != "insert" or data_fields is None or batch_size is None:
            raise RuntimeError(f"get_meta cannot serve mode={mode!r}, {data_fields=}, {batch_size=}")
        meta = _meta(partition_id, _told(lambda: self._dock.reserve(partition_id, list(data_fields), batch_size)))
        unknown = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": False}
        schema = {name: meta.field_schema.get(name, unknown) for name in data_fields}
        return BatchMeta(meta.global_indexes, meta.partition_ids, schema, meta.production_status, {}, meta.custom_meta)

    def _fetch(
        self, fields: Sequence[str], rows: int | None, partition: str, task: str | None, config: Mapping[str, Any]
    ) -> BatchMeta:
        if task is None or rows is None:
            raise RuntimeError("a fetch needs a task_name, whose rows they become, and a batch_size")
        wait_s = _patience_s()
        sampling = packed(dict(config))
        found = _told(lambda: self._dock.fetch(partition, task, list(fields), rows, sampling, wait_s))
        if found is None:
            raise RuntimeError(
                f"task {task!r} asked for {rows} rows of partition {partition!r} with the fields {list(fields)}, and "
                f"fewer came within {wait_s:g} s"
            )
        return _meta(partition, found)

    def get_data(self, metadata: BatchMeta) -> TensorDict:
        """Return the fields of these rows. The tensors are the caller's own."""
        if not metadata or not metadata.field_names:
            return TensorDict({}, batch_size=0)
        parts = _by_partition(metadata)
        found = [self._read(name, metadata, places) for name, places in parts]
        if len(found) == 1:
            return found[0]
        order = np.argsort(np.concatenate([places for _, places in parts]), kind="stable").tolist()
        return _joined(found, order, metadata.field_names)

    def _read(self, partition: str, metadata: BatchMeta, places: Sequence[int]) -> TensorDict:
        indexes = np.array([metadata.global_indexes[i] for i in places], np.int64)
        found = _told(lambda: self._dock.read(partition, indexes=indexes, fields=metadata.field_names))
        assert found is not None
        return gathered(found)

    # -- who has had what --------------------------------------------------------------------------------------------

    def get_consumption_status(self, task_name: str, partition_id: str) -> Status:
        """Return row numbers, and for each 1 where the task has had it."""
        return _status(self._dock.marks(partition_id, task=task_name))

    def get_production_status(self, data_fields: list[str], partition_id: str) -> Status:
        """Return row numbers, and for each row and field 1 where it is written."""
        return _status(self._dock.marks(partition_id, fields=list(data_fields)))

    def check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        _, status = self.get_consumption_status(task_name, partition_id)
        return status is not None and status.numel() > 0 and bool((status == 1).all())

    def check_production_status(self, data_fields: list[str], partition_id: str) -> bool:
        _, status = self.get_production_status(data_fields, partition_id)
        return status is not None and bool((status == 1).all())

    def reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Let a task, or all, have the rows of a partition once more."""
        self._dock.reset(partition_id, task_name)
        return True

    def acknowledge(self, metadata: BatchMeta) -> None:
        """Say that the work on fetched rows is done, where nothing is written to them: should this process be killed
        later, they are not given to another. TransferQueue has no such call, and no need: it loses them anyway."""
        for name, places in _by_partition(metadata):
            self._dock.settle(name, np.array([metadata.global_indexes[i] for i in places], np.int64))

    # -- keys --------------------------------------------------------------------------------------------------------

    def get_partition_list(self) -> list[str]:
        return self._dock.partitions()

    def kv_retrieve_meta(self, keys: list[str] | str, partition_id: str, create: bool = False) -> BatchMeta:
        """Return metadata of the rows of keys; `create` makes those that are new, else they are left out."""
        names = checked_keys(keys)
        found = _told(lambda: self._dock.find(partition_id, names, create))
        return BatchMeta.empty() if found is None else _meta(partition_id, found)

    def kv_retrieve_keys(self, global_indexes: list[int] | int, partition_id: str) -> list[str | None]:
        given = [global_indexes] if isinstance(global_indexes, int) else global_indexes
        if not isinstance(given, list) or any(not isinstance(i, int) for i in given):
            raise TypeError(f"global_indexes must be a whole number or a list of such, got {global_indexes!r}")
        if not given:
            raise ValueError("global_indexes is an empty list")
        names: list[str | None] = _told(lambda: self._dock.names(partition_id, np.array(given, np.int64)))
        return names

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        """Return keys and their tags, by partition."""
        listing = self._dock.listing(partition_id)
        return {name: {key: unpacked(tags) for key, tags in keys.items()} for name, keys in listing.items()}

    def kv_write(
        self,
        keys: list[str],
        partition_id: str,
        fields: TensorDict | None,
        tags: list[dict[str, Any]] | None,
        data_parser: Parser | None = None,
    ) -> tuple[list[str], list[dict[str, Any]]]:
        """Write fields, tags or both by key. Returns the fields that all these rows now have, and their tags."""
        blobs = None if tags is None else [packed(dict(tag)) for tag in tags]
        kinds = [] if fields is None else to_kinds(schema_of(fields))
        chunk = None if fields is None else chunk_of(parsed(fields, data_parser), len(keys))
        write = partial(self._dock.write, partition_id, keys=keys, kinds=kinds, chunk=chunk, tags=blobs, merges=True)
        rows = _told(write)
        return sorted(kind.name for kind in rows.kinds), _tags(rows)

    def kv_read(self, keys: list[str] | str, partition_id: str, fields: list[str] | None) -> TensorDict:
        names = checked_keys(keys)
        found = _told(lambda: self._dock.read(partition_id, keys=names, fields=fields))
        if found is None:
            raise ValueError(f"partition {partition_id!r} has none of the keys {names[:3]}")
        if not found.rows:
            raise ValueError(f"the keys {names[:3]} of partition {partition_id!r} have no field in common")
        return gathered(found) if found.fields else TensorDict({}, batch_size=0)

    def kv_drop(self, keys: list[str] | str, partition_id: str) -> None:
        self._dock.clear(partition_id, keys=checked_keys(keys))

    # -- life --------------------------------------------------------------------------------------------------------

    def saved(self) -> tuple[bytes, dict[int, Any]]:
        """Return the whole queue: its state, and the bytes of its chunks."""
        saved: tuple[bytes, dict[int, Any]] = _told(self._dock.save)
        return saved

    def restore(self, state: bytes, chunks: Mapping[int, Any]) -> None:
        _told(lambda: self._dock.load(state, chunks))

    def figures(self) -> dict[str, Any]:
        return self._dock.figures()

    def close(self, is_done: bool = True) -> None:
        self._dock.close(is_done)

    # -- as coroutines -----------------------------------------------------------------------------------------------

    async def async_put(self, *args: Any, **kwargs: Any) -> BatchMeta:
        return await asyncio.to_thread(self.put, *args, **kwargs)

    async def async_set_custom_meta(self, metadata: BatchMeta) -> None:
        await asyncio.to_thread(self.set_custom_meta, metadata)

    async def async_clear_samples(self, metadata: BatchMeta) -> None:
        await asyncio.to_thread(self.clear_samples, metadata)

    async def async_clear_partition(self, partition_id: str) -> None:
        await asyncio.to_thread(self.clear_partition, partition_id)

    async def async_get_meta(self, *args: Any, **kwargs: Any) -> BatchMeta:
        return await asyncio.to_thread(self.get_meta, *args, **kwargs)

    async def async_get_data(self, metadata: BatchMeta) -> TensorDict:
        return await asyncio.to_thread(self.get_data, metadata)

    async def async_get_consumption_status(self, task_name: str, partition_id: str) -> Status:
        return await asyncio.to_thread(self.get_consumption_status, task_name, partition_id)

    async def async_get_production_status(self, data_fields: list[str], partition_id: str) -> Status:
        return await asyncio.to_thread(self.get_production_status, data_fields, partition_id)

    async def async_check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        return await asyncio.to_thread(self.check_consumption_status, task_name, partition_id)

    async def async_check_production_status(self, data_fields: list[str], partition_id: str) -> bool:
        return await asyncio.to_thread(self.check_production_status, data_fields, partition_id)

    async def async_reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        return await asyncio.to_thread(self.reset_consumption, partition_id, task_name)

    async def async_get_partition_list(self) -> list[str]:
        return await asyncio.to_thread(self.get_partition_list)

    async def async_kv_retrieve_meta(self, keys: Any, partition_id: str, create: bool = False) -> BatchMeta:
        return await asyncio.to_thread(self.kv_retrieve_meta, keys, partition_id, create)

    async def async_kv_retrieve_keys(self, global_indexes: Any, partition_id: str) -> list[str | None]:
        return await asyncio.to_thread(self.kv_retrieve_keys, global_indexes, partition_id)

    async def async_kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        return await asyncio.to_thread(self.kv_list, partition_id)


AsyncTransferQueueClient = TransferQueueClient


def checked_keys(keys: Any) -> list[str]:
    if isinstance(keys, str):
        return [keys]
    if not isinstance(keys, list) or any(not isinstance(key, str) for key in keys):
        raise TypeError(f"keys must be a string or a list of strings, got {keys!r}")
    if not keys:
        raise ValueError("keys is an empty list")
    return keys


def _patience_s() -> float:
    """How long a fetch waits. TransferQueue looks again after its interval, and gives up when the timeout is over."""
    names = {"TQ_CONTROLLER_GET_METADATA_TIMEOUT": 1.0, "TQ_CONTROLLER_GET_METADATA_CHECK_INTERVAL": 5.0}
    return max(float(os.environ.get(name, usual)) for name, usual in names.items())


def _told(action: Callable[[], Any]) -> Any:
    """Run an action of the dock; its errors are raised as TransferQueue raises them."""
    try:
        return action()
    except Absent as error:
        raise StorageKeyNotFoundError(str(error)) from error
    except DockError as error:
        raise RuntimeError(str(error)) from error


def _by_partition(metadata: BatchMeta) -> list[tuple[str, list[int]]]:
    places: dict[str, list[int]] = {}
    for place, name in enumerate(metadata.partition_ids):
        places.setdefault(name, []).append(place)
    return list(places.items())


def _picked(data: TensorDict, places: list[int], parser: Parser | None) -> Any:
    return parsed(data[torch.tensor(places)], parser)


def _joined(parts: list[TensorDict], order: list[int], fields: list[str]) -> TensorDict:
    """Put the rows of several partitions into one order."""
    joined = {}
    for name in fields:
        rows = [row for part in parts for row in rows_of(part.get(name), part.batch_size[0])]
        joined[name] = stacked([rows[i] for i in order])
    return TensorDict(joined, batch_size=len(order))


def _tags(rows: Rows) -> list[dict[str, Any]]:
    if rows.tags is None:
        return [{} for _ in rows.indexes]
    return [{} if tags == NO_TAGS else unpacked(tags) for tags in rows.tags]


def _meta(partition: str, rows: Rows) -> BatchMeta:
    indexes = rows.indexes.tolist()
    status = rows.ready if len(rows.ready) else None
    return BatchMeta(indexes, [partition] * len(indexes), to_schema(rows.kinds), status, {}, _tags(rows))


def _status(found: Any) -> Status:
    if found is None:
        return None, None
    indexes, marks = found
    return torch.from_numpy(indexes.copy()), torch.from_numpy(marks.copy())
