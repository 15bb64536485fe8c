"""How fast one implementation of TransferQueue's interface puts and gets, on the shapes and in the way of its own
performance test: writer and reader are Ray actors, a batch of 1024 rows is put by key, listed, got and cleared.

    python benchmarks/_bridge_queue.py theirs|ours simple|complex ROUNDS

Run in an interpreter that has TransferQueue, from the repository's root. The last line of output is one JSON object.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

ROWS, LENGTH, FIELDS = 1024, 8192, 10
MODULES = {"theirs": "transfer_queue", "ours": "tidemill.bridges.transfer_queue"}


def batch(kind: str) -> Any:
    """Ten fields: all of float32 rows, or four of those, four nested ones and two of text."""
    import torch
    from tensordict import NonTensorStack, TensorDict

    nested, texts = (0, 0) if kind == "simple" else (4, 2)
    made = TensorDict(
        {f"field_{i}": torch.randn(ROWS, LENGTH) for i in range(FIELDS - nested - texts)}, batch_size=ROWS
    )
    lengths = [max(1, round(1 + i * (LENGTH - 1) / (ROWS - 1))) for i in range(ROWS)]
    for i in range(nested):
        parts = torch.split(torch.randn(sum(lengths)), lengths)
        made.set(f"nested_{i}", torch.nested.as_nested_tensor(parts, layout=torch.jagged))
    for i in range(texts):
        made.set(f"text_{i}", NonTensorStack.from_list([os.urandom(2 * LENGTH).hex() for _ in range(ROWS)]))
    return made


def nbytes(data: Any) -> int:
    import torch

    total = 0
    for name in data.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        value = data.get(name)
        if not isinstance(value, torch.Tensor):
            total += sum(map(len, value.tolist()))
        else:
            total += (value.values() if value.is_nested else value).numel() * 4
    return total


class Side:
    """A process that writes or reads."""

    def __init__(self, module: str) -> None:
        self.tq = importlib.import_module(module)
        self.tq.init()
        self.keys = [f"test_key_{i}" for i in range(ROWS)]

    def make(self, kind: str) -> int:
        self.data = batch(kind)
        return nbytes(self.data)

    def put(self, partition: str) -> None:
        self.tq.kv_batch_put(keys=self.keys, partition_id=partition, fields=self.data)

    def listing(self, partition: str) -> list[str]:
        return list(self.tq.kv_list(partition)[partition])

    def get(self, partition: str, keys: list[str]) -> None:
        self.tq.kv_batch_get(keys=keys, partition_id=partition)

    def clear(self, partition: str, keys: list[str]) -> None:
        self.tq.kv_clear(keys=keys, partition_id=partition)


def timed(ray: Any, reference: Any) -> float:
    began = time.perf_counter()
    ray.get(reference())
    return time.perf_counter() - began


def main(side: str, kind: str, rounds: int) -> dict[str, Any]:
    import ray

    settings: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(address="local", num_cpus=16, **settings)
    tq = importlib.import_module(MODULES[side])
    tq.init()
    actor = ray.remote(num_cpus=0.001)(Side)
    writer, reader = actor.remote(MODULES[side]), actor.remote(MODULES[side])
    total = ray.get(writer.make.remote(kind))
    puts, gets = [], []
    for _ in range(rounds + 1):
        puts.append(timed(ray, lambda: writer.put.remote("train_0")))
        keys = ray.get(reader.listing.remote("train_0"))
        gets.append(timed(ray, lambda keys=keys: reader.get.remote("train_0", keys)))
        ray.get(writer.clear.remote("train_0", keys))
    tq.close()
    return {"bytes": total, "put_s": puts[1:], "get_s": gets[1:]}  # the first round is a warm-up


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))), flush=True)
    os._exit(0)  # Ray's own farewell takes long
