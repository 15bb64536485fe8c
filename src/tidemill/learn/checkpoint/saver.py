"""Saving a checkpoint by several ranks while training goes on.

`save` copies this rank's pieces to the host and comes back; a thread writes them as they lie there. What it does is
long calls that hold no lock of Python's, and few of them, for on a machine without a core to spare everything else is
taken from the step. Ranks tell each other by the store how far they are, never by collectives, which belong to the
training.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tidemill.errors import CheckpointError
from tidemill.learn.checkpoint.folders import Saving
from tidemill.learn.checkpoint.pieces import Snapshot, forms_of, write_pieces
from tidemill.reshard.layouts.layout import Layout


class Saver:
    """One per rank. Errors of a save in the background are raised by the next call, on every rank."""

    def __init__(self, store: Any, rank: int, world: int, timeout_s: float = 600.0) -> None:
        self.store, self.rank, self.world, self.timeout_s = store, rank, world, timeout_s
        self.series = store.add(f"checkpoint/savers/{rank}", 1)  # of this world's savers: the same on every rank
        # A connection of the thread's own: it may wait there as long as it likes, and wakes nobody to look again.
        self._waiting = store.clone()
        self._taken: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._count = 0

    def save(self, job: Saving, tensors: Mapping[str, Tensor], layout: Layout) -> None:
        """Every rank calls this with its own tensors and the same job. `wait` tells when it is on disk."""
        self.wait()
        taken = self._taken
        if taken is None or taken.forms != forms_of(tensors):
            taken = self._taken = Snapshot.room(tensors, layout, self.rank)
        taken.take(tensors)
        self._count += 1
        self._thread = threading.Thread(
            target=self._write, args=(job, self._count, taken), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    # In the thread

    def _write(self, job: Saving, number: int, taken: Snapshot) -> None:
        try:
            if self.rank == 0:
                self._tell(number, "ready", lambda: _begin(job))
            _raise_if_failed(self._hear(number, "ready"))
            self._tell(
                number, f"wrote-{self.rank}", lambda: write_pieces(job.aside, self.rank, taken.files, taken.boxes)
            )
            if self.rank == 0:
                parts = [self._hear(number, f"wrote-{r}") for r in range(self.world)]
                self._tell(number, "end", lambda: _finish(job, parts))
            _raise_if_failed(self._hear(number, "end"))
        except BaseException as error:
            self._error = error
        finally:
            if self.rank == 0:
                shutil.rmtree(job.aside, ignore_errors=True)

    def _tell(self, number: int, key: str, work: Callable[[], Mapping[str, Any]]) -> None:
        """What the work gives, or what went wrong, in a form that other ranks can hear."""
        told: Mapping[str, Any]
        try:
            told = work()
        except CheckpointError as error:
            told = {"error": error.message, "remedy": error.remedy}
        except Exception as error:
            told = {"error": f"rank {self.rank} could not write its part of a checkpoint: {error}"}
        self.store.set(self._key(number, key), json.dumps(told))

    def _key(self, number: int, key: str) -> str:
        return f"checkpoint/{self.series}/{number}/{key}"

    def _hear(self, number: int, key: str) -> dict[str, Any]:
        name = self._key(number, key)
        try:
            self._waiting.wait([name], timedelta(seconds=self.timeout_s))
        except dist.DistStoreError as error:
            raise CheckpointError(f"a checkpoint waited {self.timeout_s:.0f} s for {key}", "is a rank dead?") from error
        heard: dict[str, Any] = json.loads(self._waiting.get(name))
        return heard


def _begin(job: Saving) -> dict[str, Any]:
    job.begin()
    return {}


def _finish(job: Saving, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """On one rank; what another could not write is everybody's failure."""
    failed = next((part for part in parts if "error" in part), None)
    if failed is None:
        job.finish(parts)
    return failed or {}


def _raise_if_failed(outcome: Mapping[str, Any]) -> None:
    if "error" in outcome:
        raise CheckpointError(outcome["error"], outcome.get("remedy", ""))


def default_saver(timeout_s: float) -> Saver:
    from torch.distributed.distributed_c10d import _get_default_store

    return Saver(_get_default_store(), dist.get_rank(), dist.get_world_size(), timeout_s)
