"""A PyTorch dataset and loader that stream rows as they become ready."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, IterableDataset

from tidemill.bridges.transfer_queue.client import TransferQueueClient
from tidemill.bridges.transfer_queue.meta.batch import BatchMeta

EMPTY_SLEEP_S = 0.05  # before asking again a queue that polls and had too little

Pair = tuple[TensorDict, BatchMeta]


class StreamingDataset(IterableDataset[Pair]):
    """Micro-batches of what a task gets of one partition; every batch is kept, and `reset` gives them again."""

    def __init__(
        self,
        config: Any,
        batch_size: int,
        micro_batch_size: int,
        data_fields: Sequence[str],
        partition_id: str,
        task_name: str,
        dp_rank: int,
        should_check_consumption_status: bool = False,
        fetch_batch_fn: Callable[..., tuple[TensorDict | None, BatchMeta]] | None = None,
        process_batch_fn: Callable[..., Any] | None = None,
    ) -> None:
        """`should_check_consumption_status`: end when the task has had all rows, instead of waiting for more."""
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, got {micro_batch_size}")
        if not data_fields:
            raise ValueError("data_fields must name at least one field")
        if dp_rank < 0:
            raise ValueError(f"dp_rank must be 0 or more, got {dp_rank}")
        self.config, self.batch_size, self.micro_batch_size = config, batch_size, micro_batch_size
        self.data_fields, self.partition_id, self.task_name = list(data_fields), partition_id, task_name
        self.dp_rank, self.should_check_consumption_status = dp_rank, should_check_consumption_status
        self.fetch_batch_fn = fetch_batch_fn or default_fetch_batch_fn
        self.process_batch_fn = process_batch_fn or chunk_batch_fn
        self.sampling_config = {"dp_rank": dp_rank, "task_name": task_name}
        self.buffer: list[Pair] = []
        self.batch_index = 0
        self._tq_client: TransferQueueClient | None = None
        super().__init__()

    def __iter__(self) -> Iterator[Any]:
        if self._tq_client is None:
            self._tq_client = TransferQueueClient("StreamingDataset", self.config["controller"]["zmq_info"])
        while self._has_more(self._tq_client):
            if self.batch_index < len(self.buffer):
                data, meta = self.buffer[self.batch_index]
                self.batch_index += 1
                yield from self.process_batch_fn(data, meta, micro_batch_size=self.micro_batch_size)
                continue
            fetched, meta = self.fetch_batch_fn(
                tq_client=self._tq_client,
                data_fields=self.data_fields,
                batch_size=self.batch_size,
                partition_id=self.partition_id,
                task_name=self.task_name,
                sampling_config=self.sampling_config,
                batch_index=self.batch_index,
            )
            if fetched is None:
                time.sleep(EMPTY_SLEEP_S)
            else:
                self.buffer.append((fetched, meta))

    def _has_more(self, client: TransferQueueClient) -> bool:
        if not self.should_check_consumption_status or self.batch_index < len(self.buffer):
            return True
        return not client.check_consumption_status(self.task_name, self.partition_id)

    def reset(self) -> None:
        """Start again with the first batch."""
        self.batch_index = 0

    def step(self, partition_id: str) -> None:
        """Go on with another partition."""
        self.buffer, self.batch_index, self.partition_id = [], 0, partition_id


class StreamingDataLoader(DataLoader[Any]):
    """Gives (data, metadata) pairs as the dataset makes them."""

    def __init__(
        self,
        dataset: StreamingDataset,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
    ) -> None:
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=collate_fn or _as_it_is,
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )
        self._streaming = dataset

    def reset(self) -> None:
        self._streaming.reset()

    def step(self, partition_id: str) -> None:
        self._streaming.step(partition_id)

    def get_buffer(self) -> list[Pair]:
        return self._streaming.buffer


def _as_it_is(pair: Any) -> Any:
    return pair


def default_fetch_batch_fn(
    tq_client: TransferQueueClient,
    data_fields: list[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: Mapping[str, Any],
    batch_index: int,
) -> tuple[TensorDict | None, BatchMeta]:
    """Fetch one batch; None where too few rows are ready."""
    config = {**sampling_config, "batch_index": batch_index, "partition_id": partition_id}
    meta = tq_client.get_meta(data_fields, batch_size, partition_id, task_name=task_name, sampling_config=config)
    return (tq_client.get_data(meta) if meta.size else None), meta


def chunk_batch_fn(td: TensorDict, batch_meta: BatchMeta, micro_batch_size: int = 1) -> list[Pair]:
    """Split a batch into micro-batches; of nested fields each gets a nested tensor of its own."""
    if not isinstance(td, TensorDict):
        raise TypeError(f"a batch must be a TensorDict, got {type(td).__name__}")
    if not isinstance(micro_batch_size, int) or micro_batch_size <= 0:
        raise ValueError(f"micro_batch_size must be a whole number of at least 1, got {micro_batch_size}")
    if not td.batch_size:
        raise ValueError("a batch must have a batch_size")
    rows = td.batch_size[0]
    if micro_batch_size > rows:
        raise ValueError(f"micro_batch_size {micro_batch_size} is more than the batch's {rows} rows")
    fields = {name: td.get(name) for name in td.keys()}  # noqa: SIM118 - a TensorDict iterates over rows
    nested = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor) and value.is_nested}
    dense = TensorDict({name: value for name, value in fields.items() if name not in nested}, batch_size=rows)
    starts = range(0, rows, micro_batch_size)
    pairs = []
    for start, meta in zip(starts, batch_meta.chunk(len(starts))):
        part = dense[start : start + micro_batch_size]
        for name, value in nested.items():
            rows_of_part = value.unbind()[start : start + micro_batch_size]
            part[name] = torch.nested.as_nested_tensor(list(rows_of_part), layout=value.layout)
        pairs.append((part, meta))
    return pairs
