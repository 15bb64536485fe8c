"""Ranks on this machine: processes of one torch.distributed world that run the same function together, again and again.
Starting one costs an import of torch and transformers, so the set is kept and reused: a world of another size is made
of the same processes. A rank that fails or dies ends the call with its own error; the others are not waited for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from tidemill.device import collective
from tidemill.errors import TidemillError
from tidemill.owned import OwnedFolder

PRELOAD = ("torch", "torch.distributed", "torch.distributed.fsdp", "transformers", "tidemill.cluster.start.ranks")
STOP_S = 5.0  # for a rank to end by itself before it is killed


class RankError(TidemillError):
    """A rank failed, died, or did not answer in time."""


class Ranks:
    """A set of `count` processes. `call` runs a function on the first `on` of them, which form a world of that size."""

    def __init__(
        self, count: int, *, kind: str = "cpu", timeout_s: float = 600.0, threads: int = 1, preload: Sequence[str] = ()
    ) -> None:
        self.count, self.kind, self.timeout_s = count, kind, timeout_s
        # Ranks meet in a file that only this user can open: torch's other stores accept anyone who can connect.
        self.folder = OwnedFolder()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, *preload])
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            settings = (rank, str(self.folder.path), kind, timeout_s, threads)
            process = context.Process(target=_serve, args=(theirs, settings), daemon=True, name=f"rank-{rank}")
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.world = 0
        self.worlds = 0

    def call(self, work: Callable[..., Any], *args: Any, on: int = 0, wait_s: float | None = None) -> list[Any]:
        """Return what `work(*args)` returned on each rank, by rank. `work` must be importable there."""
        size = on or self.count
        if self.world != size:
            self.world, self.worlds = size, self.worlds + 1
        for rank in range(size):
            self.pipes[rank].send((size, self.worlds, work, args))
        return self._collect(size, getattr(work, "__name__", str(work)), wait_s or self.timeout_s * 1.5)

    def _collect(self, size: int, name: str, wait_s: float) -> list[Any]:
        found: dict[int, Any] = {}
        while len(found) < size:
            waiting = {self.pipes[r]: r for r in range(size) if r not in found}
            ready = wait(list(waiting), wait_s)
            if not ready:
                missing = ", ".join(str(r) for r in waiting.values())
                self.kill()
                raise RankError(f"{name}: no answer from rank {missing} in {wait_s:.0f} s", "see the ranks' own logs")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                found[rank] = self._answer(rank, name)
        return [found[r] for r in range(size)]

    def _answer(self, rank: int, name: str) -> Any:
        try:
            kind, value = self.pipes[rank].recv()
        except (EOFError, OSError) as error:
            self.processes[rank].join(STOP_S)
            code = self.processes[rank].exitcode
            self.kill()
            raise RankError(
                f"rank {rank} died in {name} (exit code {code})", "a killed rank often ran out of memory"
            ) from error
        if kind == "done":
            return value
        self.kill()
        known, told = value
        if isinstance(known, TidemillError):
            known.add_note(f"on rank {rank}")
            raise known
        raise RankError(f"rank {rank} failed in {name}:\n{told}")

    @property
    def is_alive(self) -> bool:
        return all(p.is_alive() for p in self.processes)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for pipe in self.pipes:
            pipe.close()

    def close(self) -> None:
        for pipe in self.pipes:
            if not pipe.closed:
                try:
                    pipe.send(None)
                except OSError:
                    continue
        for process in self.processes:
            process.join(STOP_S)
        self.kill()
        self.folder.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def join(rank: int, size: int, file: str, kind: str, timeout_s: float) -> None:
    """Join this process's world, from which all other groups are made. The ranks meet in a new file."""
    if dist.is_initialized():
        dist.destroy_process_group()
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        collective.backend(kind), init_method=f"file://{file}", rank=rank, world_size=size, timeout=timeout
    )


def _serve(pipe: Connection, settings: tuple[int, str, str, float, int]) -> None:
    rank, folder, kind, timeout_s, threads = settings
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all processes; the loop decides when to end
    torch.set_num_threads(threads)
    collective.listen_at("127.0.0.1")
    world = 0
    while (order := _next(pipe)) is not None:
        size, number, work, args = order
        try:
            if number != world:
                join(rank, size, f"{folder}/world-{number}", kind, timeout_s)
                world = number
            pipe.send(("done", work(*args)))
        except BaseException as error:
            pipe.send(("failed", (error if isinstance(error, TidemillError) else None, traceback.format_exc())))
            if not isinstance(error, Exception):
                raise


def _next(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:  # the process that sent the calls is gone
        return None
