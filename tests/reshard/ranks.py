"""Ranks for tests: processes of one gloo group, whole models cut by layouts, and what each rank should hold."""

import multiprocessing
import os
import socket
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

from tidemill.reshard.layouts import parallel
from tidemill.reshard.layouts.layout import extents
from tidemill.reshard.pack import region
from tidemill.reshard.plan import Spot

DENSE = parallel.decoder(
    "dense", layers=2, hidden=32, heads=8, kv_heads=4, head_dim=4, ffn=48, vocabulary=200, tied=True, bias=True,
    dtype="float32",
)  # fmt: skip
MIXTURE = parallel.decoder(
    "mixture", layers=2, hidden=32, heads=8, kv_heads=2, head_dim=4, ffn=48, vocabulary=130, qk_norm=True, experts=8,
    expert_ffn=24, dense_layers=1, dtype="float32",
)  # fmt: skip


def whole(model, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in model.shapes.items()}


def cut(layout, rank, full):
    """What `rank` holds of a whole model."""
    tensors = empty(layout, rank)
    for name in layout.by_name:
        for piece in layout.pieces(name):
            if piece.rank == rank:
                view = region(tensors, Spot(piece.home, piece.at), extents(piece.box))
                view.copy_(full[name][tuple(slice(*b) for b in piece.box)].reshape(view.shape))
    return tensors


def empty(layout, rank, fill=7.0):
    return {n: torch.full(shape, fill, dtype=getattr(torch, d)) for n, (shape, d) in layout.homes(rank).items()}


def same(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def join(rank, ranks, port, timeout_s=60.0):
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s)
    )


def start(work, ranks, *args):
    """One process per rank, each running `work(rank, ranks, say, *args)`; what it says comes through the queue."""
    queue = _context().Queue()
    return [start_one(work, rank, ranks, queue, *args) for rank in range(ranks)], queue


def start_one(work, rank, ranks, queue, *args):
    process = _context().Process(target=_main, args=(work, rank, ranks, queue, args), daemon=True)
    process.start()
    return process


def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch.distributed", "tidemill.reshard.wires.one_node", "tests.reshard.ranks"]
    )
    return context


def run(work, ranks, *args, timeout_s=240.0):
    """All that the ranks said, by rank; fails when one of them failed."""
    processes, queue = start(work, ranks, *args)
    said = {r: [] for r in range(ranks)}
    left = set(range(ranks))
    while left:
        rank, kind, value = queue.get(timeout=timeout_s)
        if kind == "failed":
            for process in processes:
                process.kill()
            raise AssertionError(f"rank {rank}:\n{value}")
        if kind == "done":
            left.discard(rank)
        else:
            said[rank].append(value)
    for process in processes:
        process.join(10)
    return said


def _main(work, rank, ranks, queue, args):
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        work(rank, ranks, lambda value: queue.put((rank, "said", value)), *args)
        queue.put((rank, "done", None))
    except BaseException:
        queue.put((rank, "failed", traceback.format_exc()))
