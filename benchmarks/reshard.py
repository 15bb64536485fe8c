"""How fast, and with how little memory, a learner's weights reach an engine that cuts them differently.

Peer `gather`: every rank gathers the whole model, then takes its slices.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

ABOUT = "move weights between ranks from a learner's layout to an engine's; peer: gather all on every rank, then slice"
OPTIONS = {
    "model": "qwen2.5-0.5b",
    "layers": 0,  # 0: all of the model's
    "learner": "fsdp4",
    "engine": "tp2,dp2",
    "dtype": "bfloat16",
    "bucket_mb": 16,
    "depth": 2,
    "verify": "off",
    "grid": True,
}
PEERS = {"gather": "torch"}

GRID_LEARNERS = ["fsdp2", "fsdp4", "fsdp8", "tp2,fsdp2", "tp4", "pp2,tp2"]
GRID_EXPERT_LEARNERS = ["ep2,fsdp2", "ep4,fsdp4"]
GRID_ENGINES = ["dp4", "tp2,dp2", "tp4", "tp8"]
GRID_EXPERT_ENGINES = ["ep2,tp2"]


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    from tidemill.bench import summary
    from tidemill.reshard.layouts import parallel

    words = {**options, "token": uuid.uuid4().hex}
    ranks = max(parallel.parse(str(options[side])).size for side in ("learner", "engine"))
    said = _ranks(_bench, ranks, words)
    first = said[0]
    result: dict[str, Any] = {
        "exact": all(s["exact"] for s in said),
        "parameters": first["parameters"],
        "model_bytes": first["model_bytes"],
        "bytes": sum(s["bytes"] for s in said),
        "group_bytes": sum(s["group_bytes"] for s in said),
        "lower_bound_bytes": first["lower_bound_bytes"],
        "seconds": summary([max(runs) for runs in zip(*(s["seconds"] for s in said))]),
        "group_seconds": summary([max(runs) for runs in zip(*(s["group_seconds"] for s in said))]),
        "peak_extra_bytes": max(s["peak_extra_bytes"] for s in said),
        "group_peak_extra_bytes": max(s["group_peak_extra_bytes"] for s in said),
        "ring_bytes": first["ring_bytes"],
        "bucket_bytes": first["bucket_bytes"],
        "one_process_bytes": _one_process(str(options["model"])),
    }
    if options["grid"]:
        pairs = _ranks(_grid, 8, words)
        result["grid_pairs"] = pairs[0]["pairs"]
        result["grid_exact"] = sum(all(s["right"][i] for s in pairs) for i in range(pairs[0]["pairs"]))
        result["exact"] = result["exact"] and result["grid_exact"] == result["grid_pairs"]
    peers = {}
    if "gather" in options["peers"]:
        peers["gather"] = {
            "exact": all(s["peer"]["exact"] for s in said),
            "bytes": sum(s["peer"]["bytes"] for s in said),
            "seconds": summary([max(runs) for runs in zip(*(s["peer"]["seconds"] for s in said))]),
            "peak_extra_bytes": max(s["peer"]["peak_extra_bytes"] for s in said),
        }
    return {**result, "peers": peers}


def _one_process(name: str) -> int:
    """Bytes moved when learner and engine are one process with one layout."""
    from tidemill.estimate import weight_flow
    from tidemill.reshard.layouts import parallel
    from tidemill.reshard.plan import plan

    one = parallel.parse("dp1")
    made = plan(*(parallel.learner(weight_flow.published(name), one) for _ in range(2)))
    return made.bytes if made.is_identity else made.bytes + sum(t.nbytes for t in made.copies)


# One rank


def _bench(rank: int, ranks: int, words: Mapping[str, Any]) -> dict[str, Any]:
    from benchmarks import _weights
    from tidemill.estimate import weight_flow
    from tidemill.reshard.layouts import parallel
    from tidemill.reshard.move import BufferRing, GroupWire, Job, Moved, move
    from tidemill.reshard.plan import plan
    from tidemill.reshard.wires.one_node import SharedWire

    model = weight_flow.published(str(words["model"]), int(words["layers"]))
    dtype = str(words["dtype"])
    source = parallel.learner(model, parallel.parse(str(words["learner"])), dtype=dtype)
    target = parallel.engine(model, parallel.parse(str(words["engine"])), dtype=dtype)
    made = plan(source, target, direct=True)
    sources, targets = _weights.filled(source, rank), _weights.empty(target, rank)
    repeats, bucket, depth = int(words["repeats"]), int(words["bucket_mb"]) << 20, int(words["depth"])
    found: dict[str, Any] = {
        "parameters": parallel.count(model),
        "model_bytes": target.nbytes,
        "lower_bound_bytes": made.lower_bound_bytes,
        "exact": True,
    }
    version = 0

    def transfer(wire: Any) -> Moved:
        nonlocal version
        version += 1
        return move(Job(made, rank, sources, targets, version, words["verify"]), wire)

    def shared() -> SharedWire:
        return SharedWire(f"bench-{words['token']}", rank, ranks, depth=depth, bucket_bytes=bucket)

    makers: list[tuple[str, Callable[[], Any]]] = [
        ("", shared),
        ("group_", lambda: GroupWire(BufferRing(depth, bucket), timeout_s=300)),
    ]
    for prefix, maker in makers:
        _clear(targets)
        with _peak() as peak:
            wire = maker()
            moved = transfer(wire)
        found[f"{prefix}peak_extra_bytes"] = peak()
        found[f"{prefix}bytes"] = moved.received_bytes
        found[f"{prefix}seconds"] = [_together(lambda w=wire: transfer(w)) for _ in range(repeats)]
        found["exact"] = found["exact"] and _weights.is_right(target, rank, targets)
        if not prefix:
            found["ring_bytes"], found["bucket_bytes"] = wire.nbytes, wire.bucket_bytes
        wire.close()
        del wire
    if "gather" in words["peers"]:
        _clear(targets)
        found["peer"] = _gather(rank, ranks, source, target, sources, targets, repeats)
    return found


def _gather(
    rank: int, ranks: int, source: Any, target: Any, sources: Mapping[str, Any], targets: Any, repeats: int
) -> dict[str, Any]:
    """What most systems do. Every tensor is cut along its first dimension over all ranks (fsdpN): gather it whole."""
    import torch
    import torch.distributed as dist

    from benchmarks import _weights
    from tidemill.reshard.layouts.layout import extents
    from tidemill.reshard.pack import region
    from tidemill.reshard.plan import Spot

    received = 0
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13

    def switch() -> None:
        nonlocal received
        received = 0
        full = {}
        for name, (entry, *_) in source.by_name.items():
            rows = -(-entry.shape[0] // ranks)
            whole = torch.empty((rows * ranks, *entry.shape[1:]), dtype=getattr(torch, entry.dtype))
            mine = sources[name]
            if mine.shape[0] != rows:
                mine = torch.cat([mine, mine.new_zeros((rows - mine.shape[0], *entry.shape[1:]))])
            gather(whole.view(torch.uint8), mine.view(torch.uint8))
            received += whole.nbytes - mine.nbytes
            full[name] = whole[: entry.shape[0]]
        for name in target.by_name:
            for piece in target.pieces(name):
                if piece.rank == rank:
                    view = region(targets, Spot(piece.home, piece.at), extents(piece.box))
                    view.copy_(full[name][tuple(slice(*b) for b in piece.box)].reshape(view.shape))

    with _peak() as peak:
        switch()
    seconds = [_together(switch) for _ in range(repeats)]
    return {
        "exact": _weights.is_right(target, rank, targets),
        "bytes": received,
        "seconds": seconds,
        "peak_extra_bytes": peak(),
    }


def _grid(rank: int, ranks: int, words: Mapping[str, Any]) -> dict[str, Any]:
    """Every learner with every engine, on small models: is all where it should be?"""
    from benchmarks import _weights
    from tidemill.reshard.layouts import parallel
    from tidemill.reshard.move import BufferRing, GroupWire, Job, move
    from tidemill.reshard.plan import Topology, plan

    common: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 8, "head_dim": 4, "ffn": 48, "dtype": "float32"}
    dense = parallel.decoder("dense", **common, kv_heads=4, vocabulary=200, tied=True, bias=True)
    mixture = parallel.decoder("mixture", **common, kv_heads=2, vocabulary=130, experts=8, expert_ffn=24)
    grid = [(dense, a, b) for a in GRID_LEARNERS for b in GRID_ENGINES]
    both = GRID_LEARNERS + GRID_EXPERT_LEARNERS, GRID_ENGINES + GRID_EXPERT_ENGINES
    grid += [(mixture, a, b) for a in both[0] for b in both[1]]
    wire, right = GroupWire(BufferRing(2, 1 << 16), timeout_s=120), []
    for version, (model, learner, engine) in enumerate(grid, 1):
        source = parallel.learner(model, parallel.parse(learner))
        target = parallel.engine(model, parallel.parse(engine))
        targets = _weights.empty(target, rank)
        job = Job(plan(source, target, Topology(2)), rank, _weights.filled(source, rank), targets, version, "all")
        move(job, wire)
        right.append(_weights.is_right(target, rank, targets))
    return {"pairs": len(grid), "right": right}


def _clear(tensors: Mapping[str, Any]) -> None:
    for tensor in tensors.values():
        tensor.fill_(1)


def _together(work: Callable[[], object]) -> float:
    import torch.distributed as dist

    dist.barrier()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextmanager
def _peak() -> Iterator[Callable[[], int]]:
    """The most memory above what there was at the start, in this process's share: a page that n processes map counts
    1/n in each. Sampled."""
    status = Path("/proc/self/smaps_rollup")

    def now() -> int:
        line = next(x for x in status.read_text().splitlines() if x.startswith("Pss:"))
        return int(line.split()[1]) * 1024

    before = most = now()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.005):
            most = max(most, now())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: most - before
    finally:
        most = max(most, now())
        done.set()
        thread.join()


# Processes


def _ranks(work: Callable[..., dict[str, Any]], ranks: int, words: Mapping[str, Any]) -> list[dict[str, Any]]:
    import multiprocessing

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "tidemill.reshard.wires.one_node"])
    queue = context.Queue()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    every = [
        context.Process(target=_main, args=(work, r, ranks, port, words, queue), daemon=True) for r in range(ranks)
    ]
    for process in every:
        process.start()
    found: dict[int, dict[str, Any]] = {}
    while len(found) < ranks:
        rank, result, error = queue.get(timeout=1200)
        if error:
            for process in every:
                process.kill()
            raise RuntimeError(f"rank {rank}: {error}")
        found[rank] = result
    for process in every:
        process.join(30)
    return [found[r] for r in range(ranks)]


def _main(work: Callable[..., Any], rank: int, ranks: int, port: int, words: Mapping[str, Any], queue: Any) -> None:
    import traceback

    import torch
    import torch.distributed as dist

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    try:
        where = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks, timeout=timedelta(seconds=600))
        queue.put((rank, work(rank, ranks, words), ""))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        queue.put((rank, {}, traceback.format_exc()))
