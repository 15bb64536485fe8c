"""Where every rank is: which collective it entered last, over which dimension, with which shape.

Ranks post this now and then, from a thread of their own; nothing is sent for a single collective. When one takes too
long, whoever waits says which rank is missing, from which operation of which shape, and where that rank is instead.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tidemill.errors import CollectiveError

TICKS = 20  # positions posted in the time a collective may take
LATE = 0.8  # of the time-out: from here on a waiting rank says so
SILENT = 3  # ticks without a word after which a rank is taken for dead


@dataclass(frozen=True, slots=True)
class Position:
    """The last collective a rank entered. `number` counts those over the same dimension."""

    rank: int
    operation: str = "nothing yet"
    over: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    number: int = 0
    is_inside: bool = False
    posted: float = 0.0

    def __str__(self) -> str:
        if not self.over:
            return self.operation
        return f"{self.operation} number {self.number} of {self.dtype} {self.shape} over {self.over}"


class Flight:
    """One per process. `entered` wraps every collective of the learner."""

    def __init__(self, store: Any, rank: int, timeout_s: float) -> None:
        self.store, self.rank, self.timeout_s = store, rank, timeout_s
        self.position = Position(rank)
        self.entered_at = 0.0
        self.group: Sequence[int] = ()
        self.counts: dict[str, int] = {}
        self.seconds: dict[str, float] = {}  # spent inside, by dimension: what a straggler report is made of
        self.told: Position | None = None
        self._stop = threading.Event()
        if store is not None:
            threading.Thread(target=self._watch, name="flight", daemon=True).start()

    @staticmethod
    def of_world(timeout_s: float, is_up: bool) -> Flight:
        """Of torch.distributed's world; on one device there is nobody to post to."""
        if not is_up:
            return Flight(None, 0, timeout_s)
        from torch.distributed.distributed_c10d import _get_default_store

        return Flight(_get_default_store(), dist.get_rank(), timeout_s)

    @contextmanager
    def entered(self, operation: str, over: str, x: Tensor, group: Sequence[int]) -> Iterator[None]:
        number = self.counts[over] = self.counts.get(over, 0) + 1
        self.group = group
        self.position = Position(
            self.rank, operation, over, tuple(x.shape), str(x.dtype).removeprefix("torch."), number, True
        )
        began = self.entered_at = time.monotonic()
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            self.post()
            raise CollectiveError(f"{self.report()}\n({_first_line(error)})") from error
        self.position = _left(self.position)
        self.seconds[over] = self.seconds.get(over, 0.0) + time.monotonic() - began

    def post(self) -> None:
        words = asdict(self.position) | {"posted": time.time()}
        self.store.set(f"flight/{self.rank}", json.dumps(words))

    def read(self, rank: int) -> Position | None:
        """None when the rank never posted."""
        key = f"flight/{rank}"
        if not self.store.check([key]):
            return None
        words = json.loads(self.store.get(key))
        return Position(**{**words, "shape": tuple(words["shape"])})

    def report(self) -> str:
        """Who is missing from the collective that this rank is in, and where they are."""
        mine = self.position
        missing = [words for rank in self.group if rank != self.rank and (words := self._absence(rank, mine))]
        head = f"rank {self.rank} waited {time.monotonic() - self.entered_at:.0f} s in {mine}"
        return f"{head}; {'; '.join(missing)}" if missing else f"{head}; every rank of its group is in it too"

    def _absence(self, rank: int, mine: Position) -> str:
        theirs = self.read(rank)
        if theirs is None:
            return f"rank {rank} is missing: it never joined a collective"
        silent = time.time() - theirs.posted
        if silent > SILENT * self._tick:
            return f"rank {rank} is missing: it was last heard of {silent:.0f} s ago, in {theirs}, and may be dead"
        if (theirs.over, theirs.number) == (mine.over, mine.number):
            same = (theirs.operation, theirs.shape, theirs.dtype) == (mine.operation, mine.shape, mine.dtype)
            return "" if same else f"rank {rank} came with another one: {theirs}"
        if theirs.is_inside:
            return f"rank {rank} is missing: it waits in {theirs}"
        return f"rank {rank} is missing: it is busy outside of any collective since {theirs}"

    @property
    def _tick(self) -> float:
        return max(0.05, self.timeout_s / TICKS)

    def _watch(self) -> None:
        while not self._stop.wait(self._tick):
            try:
                self.post()
                late = time.monotonic() - self.entered_at > LATE * self.timeout_s
                if self.position.is_inside and late and self.told != self.position:
                    self.told = self.position
                    print(f"tidemill: {self.report()}", file=sys.stderr, flush=True)
            except (RuntimeError, OSError):  # the store went with its process: nobody is left to tell
                return

    def close(self) -> None:
        self._stop.set()


def _left(position: Position) -> Position:
    return Position(**{**asdict(position), "is_inside": False})


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
