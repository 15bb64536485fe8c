"""Publishing between processes of one device: a learner sends a whole model, an engine with fused tensors receives it.

Blocks go through a ring that both processes map: device memory through inter-process handles on an accelerator, shared
memory on a host. `gbps` counts each received byte once; `copy_gbps` is what one plain copy within the same memory
gives, and every byte takes two such copies, into the ring and out of it.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

ABOUT = "publish weights from a learner's process to an engine's on the same device: rate, exactness, extra memory"
OPTIONS: dict[str, Any] = {
    "model": "qwen2.5-0.5b",
    "layers": 0,  # 0: all of the model's
    "dtype": "bfloat16",
    "learner": "fsdp1",
    "engine": "tp1",
    "bucket_mb": 32,
    "depth": 2,
    "verify": "off",  # of the timed moves; the first one is checked block by block
    "device": "auto",
}
COPY_BYTES, LEAST_COPY_BYTES = 1 << 30, 1 << 28
WAIT_S = 300.0


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    from tidemill.bench import summary

    said = _processes(dict(options))
    seconds = [max(runs) for runs in zip(*(s["seconds"] for s in said))]
    received = sum(s["received"] for s in said)
    rate, copied = received / 1e9 / statistics.median(seconds), max(s["copy_gbps"] for s in said)
    return {
        "device": said[0]["device"],
        "exact": all(s["exact"] for s in said),
        "gbps": rate,
        "copy_gbps": copied,
        "share_of_copy": rate / copied,
        "seconds": summary(seconds),
        "received_bytes": received,
        "lower_bound_bytes": said[0]["lower_bound"],
        "peak_extra_bytes": max(s["peak"] for s in said),
        "ring_bytes": said[0]["ring"],
        "bucket_bytes": said[0]["bucket"],
    }


def _processes(words: dict[str, Any]) -> list[dict[str, Any]]:
    from tidemill.reshard.layouts import parallel

    sizes = [parallel.parse(str(words[side])).size for side in ("learner", "engine")]
    context = multiprocessing.get_context("spawn")  # a fork cannot use an accelerator
    queue = context.Queue()
    words |= {"token": uuid.uuid4().hex, "ranks": sum(sizes), "learners": sizes[0]}
    processes = [context.Process(target=_process, args=(r, words, queue), daemon=True) for r in range(sum(sizes))]
    for process in processes:
        process.start()
    try:
        said = [queue.get(timeout=WAIT_S) for _ in processes]
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    if failed := [s["error"] for s in said if "error" in s]:
        raise RuntimeError(failed[0])
    return said


def _process(rank: int, words: Mapping[str, Any], queue: Any) -> None:
    try:
        queue.put(_moved(rank, words))
    except Exception as error:
        queue.put({"error": f"rank {rank}: {type(error).__name__}: {error}"})


def _moved(rank: int, words: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    from benchmarks import _weights
    from tidemill import device
    from tidemill.estimate import weight_flow
    from tidemill.reshard.layouts import parallel
    from tidemill.reshard.move import Job, move
    from tidemill.reshard.plan import plan
    from tidemill.reshard.wires.one_node import SharedWire

    torch.set_num_threads(1)
    chosen = device.pick(str(words["device"]))
    where, dtype, ranks = chosen.torch_device, str(words["dtype"]), int(words["ranks"])
    model = weight_flow.published(str(words["model"]), int(words["layers"]))
    source = parallel.learner(model, parallel.parse(str(words["learner"])), dtype=dtype)
    target = parallel.engine(model, parallel.parse(str(words["engine"])), first=int(words["learners"]), dtype=dtype)
    made = plan(source, target, direct=True)
    sources = _weights.filled(source, rank, where) if rank < int(words["learners"]) else {}
    targets = _weights.empty(target, rank, where) if rank >= int(words["learners"]) else {}
    seconds, received = [], 0
    with _peak(where) as peak:
        wire = SharedWire(
            str(words["token"]),
            rank,
            ranks,
            depth=int(words["depth"]),
            device=where,
            bucket_bytes=int(words["bucket_mb"]) << 20,
            timeout_s=WAIT_S,
        )
        for version in range(1, int(words["repeats"]) + 2):
            verify = "all" if version == 1 else words["verify"]
            moved = move(Job(made, rank, sources, targets, version, verify), wire)
            _synchronize(where)
            seconds.append(moved.seconds)
            received = moved.received_bytes
    found = {
        "device": chosen.name,
        "exact": _weights.is_right(target, rank, {n: t.cpu() for n, t in targets.items()}),
        "seconds": seconds[1:],
        "received": received,
        "lower_bound": made.lower_bound_bytes,
        "peak": peak(),
        "ring": wire.nbytes,
        "bucket": wire.bucket_bytes,
    }
    wire.close()
    return {**found, "copy_gbps": _copy_gbps(where)}


@contextmanager
def _peak(where: Any) -> Iterator[Callable[[], int]]:
    """The most memory beyond what there was: of the accelerator, or this process's share of the host's."""
    import torch

    if where.type == "cpu":
        from benchmarks.reshard import _peak as on_host

        with on_host() as peak:
            yield peak
        return
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    yield lambda: torch.accelerator.max_memory_allocated() - before


def _copy_gbps(where: Any, times: int = 7) -> float:
    """One plain copy of one large tensor within the device's memory."""
    import torch

    size = COPY_BYTES if where.type != "cpu" else LEAST_COPY_BYTES
    here, there = (torch.ones(size, dtype=torch.uint8, device=where) for _ in range(2))

    def copy() -> float:
        started = time.perf_counter()
        there.copy_(here)
        _synchronize(where)
        return time.perf_counter() - started

    return size / 1e9 / statistics.median(copy() for _ in range(times))


def _synchronize(where: Any) -> None:
    import torch

    if where.type != "cpu":
        torch.accelerator.synchronize()
