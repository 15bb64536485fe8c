"""The functions that a program calls, with the names and arguments of TransferQueue 0.1.11."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from tidemill.bridges.transfer_queue import checkpoint, system
from tidemill.bridges.transfer_queue.client import TransferQueueClient, checked_keys
from tidemill.bridges.transfer_queue.meta.keyed import KVBatchMeta

Tags = dict[str, Any]
Parser = Callable[[Any], Any]

# -- start and end ----------------------------------------------------------------------------------------------------


def init(conf: Any = None) -> Any:
    """Start the queue, or connect to the one that this job has; then `conf` is ignored. Returns the configuration."""
    return system.start(conf)


def close() -> None:
    """Leave the queue, with all work on fetched rows done. The process that started it ends it for all."""
    system.stop()


def get_client() -> TransferQueueClient:
    """Return this process's client, for calls by row number."""
    client = system.known_client()
    if client is None:
        raise AssertionError("this process has no TransferQueue: call init() first")
    return client


def get_metrics_endpoint() -> str | None:
    """Return host:port where Prometheus finds the figures, if `metrics.enabled` is set."""
    config = system.config()
    return None if config is None else config["metrics"]["endpoint"]


# -- by key -----------------------------------------------------------------------------------------------------------


def kv_put(
    key: str,
    partition_id: str,
    fields: TensorDict | dict[str, Any] | None = None,
    tag: Tags | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Write fields, a tag or both for one key. Fields that it has already stay, or are replaced."""
    if fields is None and tag is None:
        raise ValueError("kv_put needs fields, a tag, or both")
    if isinstance(fields, dict):
        fields = _one_row(fields)
    elif fields is not None and not isinstance(fields, TensorDict):
        raise ValueError(f"fields must be a dict or a TensorDict, got {type(fields).__name__}")
    return kv_batch_put([key], partition_id, fields, None if tag is None else [tag], data_parser)


def _one_row(fields: dict[str, Any]) -> TensorDict:
    row: dict[str, Any] = {}
    for name, value in fields.items():
        if not isinstance(value, torch.Tensor):
            row[name] = NonTensorStack(value)
        elif value.is_nested:
            raise ValueError(f"field {name!r} holds several rows: use kv_batch_put")
        else:
            row[name] = value.unsqueeze(0)
    return TensorDict(row, batch_size=[1])


def kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: list[Tags] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Write fields, tags or both, a row for each key. Returns the fields and tags that all the keys now have."""
    if fields is None and tags is None:
        raise ValueError("kv_batch_put needs fields, tags, or both")
    for what, n in (("fields", None if fields is None else fields.batch_size[0]), ("tags", tags and len(tags))):
        if n is not None and n != len(keys):
            raise ValueError(f"kv_batch_put was given {len(keys)} keys and {n} rows of {what}")
    names = checked_keys(keys)
    written, noted = system.client().kv_write(names, partition_id, fields, tags, data_parser)
    own = noted if tags is None else [{**before, **given} for before, given in zip(noted, tags)]
    return KVBatchMeta(keys, own, partition_id, written, {})


def kv_batch_get(keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None) -> TensorDict:
    """Return fields by key: those chosen, or all that every key has. Keys that are not there are left out."""
    chosen = [select_fields] if isinstance(select_fields, str) else select_fields
    return system.client().kv_read(keys, partition_id, chosen)


def kv_batch_get_by_meta(meta: KVBatchMeta, select_fields: list[str] | str | None = None) -> TensorDict:
    """The same for the keys of a KVBatchMeta, with the fields that it names."""
    if meta.partition_id is None:
        raise ValueError("this KVBatchMeta has no partition_id")
    chosen = [select_fields] if isinstance(select_fields, str) else select_fields
    unknown = [name for name in chosen or () if name not in (meta.fields or ())]
    if unknown:
        raise ValueError(f"this KVBatchMeta has the fields {meta.fields}, not {unknown}")
    return kv_batch_get(meta.keys, meta.partition_id, meta.fields if chosen is None else chosen)


def kv_list(partition_id: str | None = None) -> dict[str, dict[str, Any]]:
    """Return keys and their tags, of one partition or of all."""
    return system.client().kv_list(partition_id)


def kv_clear(keys: list[str] | str, partition_id: str) -> None:
    """Remove keys with all that they have. Those that are not there are ignored."""
    system.client().kv_drop(keys, partition_id)


async def async_kv_put(
    key: str,
    partition_id: str,
    fields: TensorDict | dict[str, Any] | None = None,
    tag: Tags | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    return await asyncio.to_thread(kv_put, key, partition_id, fields, tag, data_parser)


async def async_kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: list[Tags] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    return await asyncio.to_thread(kv_batch_put, keys, partition_id, fields, tags, data_parser)


async def async_kv_batch_get(
    keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None
) -> TensorDict:
    return await asyncio.to_thread(kv_batch_get, keys, partition_id, select_fields)


async def async_kv_batch_get_by_meta(meta: KVBatchMeta, select_fields: list[str] | str | None = None) -> TensorDict:
    return await asyncio.to_thread(kv_batch_get_by_meta, meta, select_fields)


async def async_kv_list(partition_id: str | None = None) -> dict[str, dict[str, Any]]:
    return await asyncio.to_thread(kv_list, partition_id)


async def async_kv_clear(keys: list[str] | str, partition_id: str) -> None:
    await asyncio.to_thread(kv_clear, keys, partition_id)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def save_checkpoint(
    checkpoint_dir: str | Path, *, include_storage: bool = True, metadata: dict[str, Any] | None = None
) -> None:
    """Write the whole queue to a folder. The bytes are always included: they are nowhere else."""
    checkpoint.save(_started(), Path(checkpoint_dir), metadata)


def load_checkpoint(checkpoint_dir: str | Path) -> None:
    """Make the queue what it was when that folder was written."""
    checkpoint.load(_started(), Path(checkpoint_dir))


def _started() -> TransferQueueClient:
    client = system.known_client()
    if client is None:
        raise RuntimeError("there is no TransferQueue: call init() first")
    return client
