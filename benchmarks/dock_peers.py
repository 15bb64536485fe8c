"""What others offer for the same job, driven the same way: one process writes, another reads.

Run by `benchmarks/dock.py` in an interpreter where the peers are installed:

    python benchmarks/dock_peers.py transferqueue|ray_put|central_actor
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from typing import Any

import numpy as np

from dock_payload import CALLS, Copier, Side, big, carry, jagged, nbytes, note, rows_per_s, small, speeds, timed

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
NAMESPACE = "transfer_queue"
STORE_BYTES = 3 << 30
TAKE_ROWS = 64
GIVE_UP_S = 15.0


def start_ray() -> str:
    import ray

    settings: dict[str, Any] = {"include_dashboard": False, "logging_level": "ERROR", "namespace": NAMESPACE}
    context = ray.init(num_cpus=16, object_store_memory=STORE_BYTES, **settings)
    return str(context.address_info["address"])


def join_ray(address: str) -> None:
    import ray

    # Worker processes are found by the same path as here: no upload of the working directory.
    ray.init(address=address, logging_level="ERROR", namespace=NAMESPACE)


# -- TransferQueue ----------------------------------------------------------------------------------------------------


class TransferQueueSide(Copier):
    """Newest release, SimpleStorage with two units, its synchronous client. A put inserts rows into a partition; a get
    is get_meta (which samples and marks consumption) and get_data."""

    def __init__(self, address: str) -> None:
        join_ray(address)
        import transfer_queue as tq

        tq.init()
        self._client = tq.get_client()

    def _tensors(self, kind: str) -> Any:
        import torch
        from tensordict import TensorDict

        if kind == "jagged":
            columns = {
                name: torch.tensor(np.array(rows))
                if name == "reward"
                else torch.nested.as_nested_tensor([torch.from_numpy(r) for r in rows], layout=torch.jagged)
                for name, rows in jagged().items()
            }
            return TensorDict(columns, batch_size=len(jagged()["reward"]))
        columns = {name: torch.from_numpy(values) for name, values in big().items()}
        return TensorDict(columns, batch_size=len(columns["c0"]))

    def put(self, kind: str, i: int) -> float:
        data = self._tensors(kind)
        return timed(lambda: self._client.put(data, partition_id=f"{kind}{i}"))

    def get(self, kind: str, i: int) -> float:
        fields = list(jagged(4)) if kind == "jagged" else list(big_names())
        partition = f"{kind}{i}"
        metas = []

        def get() -> None:
            metas.append(self._meta(fields, 1024, partition))
            self._client.get_data(metas[0])

        seconds = timed(get)
        self._client.clear_partition(partition)
        return seconds

    def _meta(self, fields: list[str], rows: int, partition: str) -> Any:
        return self._client.get_meta(data_fields=fields, batch_size=rows, partition_id=partition, task_name="read")

    def put_many(self, rows: int, calls: int) -> float:
        import torch
        from tensordict import TensorDict

        data = TensorDict({name: torch.from_numpy(v) for name, v in small(rows).items()}, batch_size=rows)

        def put() -> None:
            for _ in range(calls):
                self._client.put(data, partition_id=f"many{rows}")

        return timed(put)

    def get_many(self, rows: int, calls: int) -> float:
        fields = list(big_names())

        def get() -> None:
            for _ in range(calls):
                self._client.get_data(self._meta(fields, rows, f"many{rows}"))

        seconds = timed(get)
        self._client.clear_partition(f"many{rows}")
        return seconds

    def fill(self, table: str, rows: int) -> float:
        import torch
        from tensordict import TensorDict

        data = TensorDict({"x": torch.zeros(rows, 1)}, batch_size=rows)
        return timed(lambda: self._client.put(data, partition_id=table))

    def take(self, table: str, calls: int) -> list[float]:
        return [timed(lambda: self._meta(["x"], TAKE_ROWS, table)) for _ in range(calls)]

    def starve(self) -> None:
        """Ask for rows that will not come, for as long as this process lives."""
        self.fill("starved", 4)
        while True:
            with contextlib.suppress(Exception):
                self._meta(["x"], 64, "starved")

    def ping(self, calls: int) -> list[float]:
        """A neighbour's small put and get."""
        import torch
        from tensordict import TensorDict

        data = TensorDict({"x": torch.zeros(1, 1)}, batch_size=1)

        def once() -> None:
            self._client.put(data, partition_id="ping")
            self._client.get_data(self._meta(["x"], 1, "ping"))

        return [timed(once) for _ in range(calls)]


def big_names() -> tuple[str, ...]:
    return tuple(f"c{i}" for i in range(9))


def transferqueue() -> dict[str, Any]:
    import transfer_queue as tq
    from omegaconf import OmegaConf

    address = start_ray()
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 2}}}))
    writer, reader = Side(TransferQueueSide, address), Side(TransferQueueSide, address)
    result = moved(writer, reader, repeats=3)
    result["rows_per_s"] = rows_per_s(writer, reader, {1: 60, 8: 40, 64: 20})
    result["take_ms"] = {}
    for rows in (1000, 100_000, 1_000_000):
        try:
            writer.ask("fill", f"table{rows}", rows, within_s=120)
            times = reader.ask("take", f"table{rows}", 5, within_s=60)
            result["take_ms"][str(rows)] = round(1e3 * statistics.median(times), 3)
        except (TimeoutError, RuntimeError) as error:
            result["take_ms"][str(rows)] = None
            result["take_note"] = f"{rows} rows: {error}"
            break
    quiet = statistics.median(writer.ask("ping", 30))
    reader.tell("starve")
    time.sleep(2)
    try:
        starved = statistics.median(writer.ask("ping", 5, within_s=GIVE_UP_S))
    except TimeoutError:
        starved = GIVE_UP_S
        result["starved_note"] = f"the neighbour did not get through within {GIVE_UP_S:.0f} s; that is given"
    result["starved_neighbour_ms"] = round(1e3 * (starved - quiet), 3)
    result["version"] = tq.__version__
    for side in (writer, reader):
        side.end()
    return result


# -- Ray --------------------------------------------------------------------------------------------------------------


class RaySide(Copier):
    """What goes from one process to another passes a small named actor; how, is told below."""

    def __init__(self, address: str) -> None:
        join_ray(address)
        import ray

        self._ray = ray
        self._post = ray.get_actor("post")

    def _leave(self, data: Any) -> None:
        raise NotImplementedError

    def _fetch(self) -> Any:
        raise NotImplementedError

    def put(self, kind: str, i: int) -> float:
        data = jagged() if kind == "jagged" else big()
        return timed(lambda: self._leave(data))

    def get(self, kind: str, i: int) -> float:
        """Views of the object store are copied: the copy is what a learner pays."""
        return timed(lambda: _copy_out(self._fetch()))

    def put_many(self, rows: int, calls: int) -> float:
        data = small(rows)

        def put() -> None:
            for _ in range(calls):
                self._leave(data)

        return timed(put)

    def get_many(self, rows: int, calls: int) -> float:
        def get() -> None:
            for _ in range(calls):
                self._fetch()

        return timed(get)


class RayPutSide(RaySide):
    """`ray.put` of a dict of arrays and `ray.get`; only the reference goes through the actor."""

    def _leave(self, data: Any) -> None:
        self._ray.get(self._post.leave.remote([self._ray.put(data)]))

    def _fetch(self) -> Any:
        return self._ray.get(self._ray.get(self._post.fetch.remote())[0])

    def get_view(self, kind: str, i: int) -> float:
        return timed(self._fetch)


class CentralSide(RaySide):
    """Everything through one Ray actor that keeps it."""

    def _leave(self, data: Any) -> None:
        self._ray.get(self._post.leave.remote(data))

    def _fetch(self) -> Any:
        return self._ray.get(self._post.fetch.remote())


class Post:
    def __init__(self) -> None:
        self._left: list[Any] = []

    def leave(self, data: Any) -> None:
        self._left.append(data)

    def fetch(self) -> Any:
        return self._left.pop(0)


def _copy_out(found: dict[str, Any]) -> None:
    for rows in found.values():
        if isinstance(rows, np.ndarray):
            rows.copy()
        else:
            np.concatenate([np.atleast_1d(row) for row in rows])


def with_ray(side: type) -> dict[str, Any]:
    import ray

    address = start_ray()
    post = ray.remote(Post).options(name="post").remote()
    writer, reader = Side(side, address), Side(side, address)
    result = moved(writer, reader, repeats=3)
    if side is RayPutSide:
        writer.ask("put", "big", 0)
        result["get_zero_copy_ms"] = round(1e3 * reader.ask("get_view", "big", 0), 3)
    result["rows_per_s"] = rows_per_s(writer, reader, CALLS)
    result["version"] = ray.__version__
    for one in (writer, reader):
        one.end()
    del post
    return result


def moved(writer: Side, reader: Side, repeats: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for kind, data in (("big", big()), ("jagged", jagged())):
        note(result, kind, speeds(nbytes(data), *carry(writer, reader, kind, repeats)))
    return result


PEERS = {
    "transferqueue": transferqueue,
    "ray_put": lambda: with_ray(RayPutSide),
    "central_actor": lambda: with_ray(CentralSide),
}

if __name__ == "__main__":
    print("RESULT " + json.dumps(PEERS[sys.argv[1]]()), flush=True)
    os._exit(0)  # Ray's own farewell takes long and tells nothing
