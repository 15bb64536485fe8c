"""Ranks for tests: processes started once and kept, which form a new gloo group of any size for every case."""

import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

PRELOAD = ["torch", "torch.distributed.fsdp", "transformers.models.auto", "tests.learn.parallel.models"]


class Crew:
    """`run(work, ranks, *args)` calls `work(rank, *args)` on that many ranks and gives what each returned."""

    def __init__(self, ranks: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.folder = tempfile.TemporaryDirectory()
        self.cases = 0
        pipes = [context.Pipe() for _ in range(ranks)]
        self.ends = [mine for mine, _ in pipes]
        self.processes = [
            context.Process(target=_main, args=(rank, theirs), daemon=True) for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()

    def run(self, work, ranks, *args, timeout_s=120.0):
        self.cases += 1
        where = f"file://{self.folder.name}/{self.cases}"
        for end in self.ends[:ranks]:
            end.send((work, ranks, where, args))
        found, failed = [], []
        for rank, end in enumerate(self.ends[:ranks]):
            if not end.poll(timeout_s):
                raise AssertionError(f"rank {rank} of {ranks} has not answered for {timeout_s:g} s")
            is_good, value = end.recv()
            (found if is_good else failed).append(value)
        if failed:
            raise AssertionError("\n".join(failed))
        return found

    def close(self) -> None:
        for end in self.ends:
            end.send(None)
        for process in self.processes:
            process.join(10)
        self.folder.cleanup()


def _main(rank, end) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    while (case := end.recv()) is not None:
        work, ranks, where, args = case
        try:
            dist.init_process_group(
                "gloo", init_method=where, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
            )
            end.send((True, work(rank, *args)))
        except BaseException:
            end.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
