"""One rollout engine over several ranks: the first takes requests and returns samples, the others do the same steps.
The first rank writes each call to its engine into a list in the ranks' store; the others read the list and repeat the
calls. They do so in a thread of their own, so that rollout and learning on one rank never wait for each other."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from tidemill.cluster.report import StoreAddress
from tidemill.cluster.worker.learners import World
from tidemill.cluster.worker.store import KeyedStore
from tidemill.errors import CollectiveError
from tidemill.rollout.engine import (
    Completion,
    OnTokens,
    Partial,
    Request,
    RolloutEngine,
    Sampling,
    Streams,
    cache_counts,
)
from tidemill.rollout.native.ranks import share

KEPT_NOTES = 64  # kept in the store: every step waits for all ranks, so none is that far behind
IDLE = timedelta(days=1)  # a first rank without work writes nothing; when it ends, the store closes


class Call(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """A call to the first rank's engine; on the wire its name, then its fields."""


class Submit(Call, frozen=True):
    """A request as the other ranks need it: they return no samples."""

    id: int
    prompt: list[int]
    sampling: Sampling
    n: int
    limits: list[int] | None
    draw_id: int | None = None
    stream: int | None = None


class Step(Call, frozen=True):
    made: int  # checksum of what the previous step finished


class Pause(Call, frozen=True):
    pass


class Resume(Call, frozen=True):
    samples: list[tuple[int, int]]  # request and index


class Cancel(Call, frozen=True):
    request: int


class Load(Call, frozen=True):
    """The weights have arrived already; this is their version."""

    version: int


class Sleep(Call, frozen=True):
    pass


class Wake(Call, frozen=True):
    pass


class Order(Call, frozen=True):
    """Marks the place of a command that the driver sent to all ranks."""


class Gather(Call, frozen=True):
    """All ranks contribute their part of the model."""


_encode = msgspec.msgpack.Encoder(enc_hook=lambda number: number.item()).encode  # tokens may be numpy integers
_decode = msgspec.msgpack.Decoder(
    list[Submit | Step | Pause | Resume | Cancel | Load | Sleep | Wake | Order | Gather]
).decode


class Notes:
    """The list of calls, in a store that the first rank's process keeps, or in that of the ranks' world."""

    def __init__(self, where: StoreAddress, engine: int, followers: int, wait_s: float) -> None:
        self.wait_s, self._followers, self._engine = wait_s, followers, engine
        self._store = KeyedStore(where, IDLE)
        self._number = 0

    def write(self, calls: Sequence[Call]) -> None:
        self._store.set(self._key("calls"), _encode(calls))
        if self._number >= KEPT_NOTES:
            self._store.delete_key(self._key("calls", self._number - KEPT_NOTES))
        self._number += 1

    def read(self) -> Sequence[Call]:
        """Return the next calls; wait for them."""
        found = _decode(self._store.get(self._key("calls")))
        self._number += 1
        return found

    def confirm(self) -> None:
        """Confirm that this rank has done what it read last."""
        if self._store.add(self._key("done"), 1) == self._followers:
            self._store.set(self._key("all"), b"")

    def await_all(self) -> None:
        """Wait until all ranks have done what was written last."""
        try:
            self._store.wait([self._key("all")], timedelta(seconds=self.wait_s))
        except CollectiveError as error:
            raise CollectiveError(f"the other ranks of an engine did not sleep within {self.wait_s:g} s") from error
        for what in ("done", "all"):
            self._store.delete_key(self._key(what))

    def _key(self, what: str, number: int | None = None) -> str:
        return f"engine-{self._engine}/{what}-{self._number if number is None else number}"


class LeadEngine:
    """Implements `RolloutEngine` on the first rank. Until the ranks have joined, it has no work and accepts none."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._engine: RolloutEngine | None = None
        self._notes: Notes | None = None
        self._unsaid: list[Call] = []
        self._made = 0  # checksum of what the previous step finished: the other ranks must have made the same

    def join(self, engine: RolloutEngine, notes: Notes) -> None:
        self._engine, self._notes = engine, notes

    @property
    def engine(self) -> RolloutEngine:
        if self._engine is None:
            raise CollectiveError("the ranks of this engine have not joined yet")
        return self._engine

    @property
    def version(self) -> int:
        return self._engine.version if self._engine is not None else -1

    @property
    def has_work(self) -> bool:
        return self._engine is not None and self._engine.has_work

    @property
    def on_tokens(self) -> OnTokens | None:
        return self.engine.on_tokens if isinstance(self.engine, Streams) else None

    @on_tokens.setter
    def on_tokens(self, hear: OnTokens | None) -> None:
        if isinstance(self.engine, Streams):
            self.engine.on_tokens = hear

    def submit(self, request: Request) -> None:
        limits = None if request.limits is None else list(request.limits)
        self._say(
            Submit(
                request.id, list(request.prompt), request.sampling, request.n, limits, request.draw_id, request.stream
            )
        )
        self.engine.submit(request)

    def step(self) -> list[Completion]:
        self._say(Step(self._made))
        with self.world.within("a step of an engine's ranks"):
            self._write()
            done = self.engine.step()
        self._made = checksum(done)
        return done

    def cache_counts(self) -> dict[str, int]:
        return cache_counts(self._engine)

    def pause(self) -> list[Partial]:
        if self._engine is None:
            return []
        self._say(Pause())
        self._write()  # replicas tell each other what they took out
        with self.world.within("pausing an engine's ranks"):
            return self.engine.pause()

    def resume(self, partials: Sequence[Partial]) -> None:
        if partials:
            self._say(Resume([(p.request.id, p.index) for p in partials]))
            self.engine.resume(partials)

    def cancel(self, request_id: int) -> None:
        self._say(Cancel(request_id))
        self.engine.cancel(request_id)

    def load(self, weights: Any, version: int) -> None:
        self._say(Load(version))
        self.engine.load(weights, version)

    def sleep(self) -> None:
        """Sleep on all ranks. On return the other ranks' memory is free, too: learning may need it next."""
        self._say(Sleep())
        self._write()
        self.engine.sleep()
        if self._notes is not None:
            with self.world.within("waiting for an engine's ranks to sleep"):
                self._notes.await_all()

    def wake(self) -> None:
        self._say(Wake())
        self.engine.wake()

    def order(self) -> None:
        """Mark the place of a command to all ranks among the steps."""
        self._say(Order())
        self._write()

    def gathered(self, model: Any, group: Any) -> dict[str, Tensor]:
        """Gather the whole model in host memory."""
        self._say(Gather())
        self._write()
        return share.gathered(model, group)

    def _say(self, call: Call) -> None:
        self._unsaid.append(call)

    def _write(self) -> None:
        if self._notes is not None and self._unsaid:
            said, self._unsaid = self._unsaid, []
            self._notes.write(said)


class Follower:
    """Another rank's engine, which repeats the first rank's calls."""

    def __init__(self, engine: Any, notes: Notes, model: Any, group: Any, device: torch.device) -> None:
        self.engine, self.notes, self.model, self.group, self.device = engine, notes, model, group, device
        self.error: BaseException | None = None
        self.operation: tuple[str, float] | None = None
        self._paused: dict[tuple[int, int], Partial] = {}
        self._made = 0
        self._changed = threading.Condition()
        self._is_ordered = False  # the first rank has reached a command, and nothing moves here until it is done
        self._is_at_order = False  # and so has this rank
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @contextmanager
    def at_order(self, wait_s: float) -> Iterator[None]:
        """Within the context, the first rank is at the same command and the engine does not move."""
        with self._changed:
            is_there = self._changed.wait_for(lambda: self._is_ordered or self.error is not None, wait_s)
            self._is_at_order = self._is_ordered
        self.check()
        if not is_there:
            raise CollectiveError(f"the engine's first rank did not reach the same command within {wait_s:g} s")
        try:
            yield
        finally:
            with self._changed:
                self._is_ordered = self._is_at_order = False
                self._changed.notify_all()

    def check(self) -> None:
        """Raise the thread's error."""
        if self.error is not None:
            raise CollectiveError(f"this rank's engine stopped: {self.error}") from self.error

    def _run(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device.index or 0)  # each thread has its own
        try:
            while True:
                for call in self.notes.read():
                    self._do(call)
        except BaseException as error:
            with self._changed:
                self.error = error
                self._changed.notify_all()

    def _do(self, call: Call) -> None:
        engine = self.engine
        match call:
            case Submit(id, prompt, sampling, n, limits, draw_id, stream):
                engine.submit(Request(id, prompt, sampling, n, limits, draw_id=draw_id, stream=stream))
            case Step(made):
                self._step(made)
            case Pause():
                self._paused = {(p.request.id, p.index): p for p in engine.pause()}
            case Resume(samples):
                engine.resume([self._paused.pop(key) for key in samples])
            case Cancel(request):
                engine.cancel(request)
            case Load(version):
                engine.load(None, version)
            case Sleep():
                engine.sleep()
                self.notes.confirm()
            case Wake():
                engine.wake()
            case Order():
                self._stand_still()
            case Gather():
                share.gathered(self.model, self.group)

    def _step(self, made: int) -> None:
        if made != self._made:
            raise CollectiveError("the ranks of an engine made different tokens")
        self.operation = ("a step of an engine's ranks", time.monotonic())
        self._made = checksum(self.engine.step())
        self.operation = None

    def _stand_still(self) -> None:
        with self._changed:
            self._is_ordered = True
            self._changed.notify_all()
            wait_s = self.notes.wait_s
            if not self._changed.wait_for(lambda: self._is_at_order or not self._is_ordered, wait_s):
                self._is_ordered = False
                raise CollectiveError(f"the engine's first rank is at a command that never arrived here ({wait_s:g} s)")
            self._changed.wait_for(lambda: not self._is_ordered)  # the command's own work has deadlines


def checksum(done: Sequence[Completion]) -> int:
    found = 0
    for completion in done:
        found = zlib.crc32(repr((completion.request.id, completion.index, completion.tokens)).encode(), found)
    return found


def engine_groups(kind: str, ranks: int, parts: int, timeout_s: float) -> Any:
    """Make groups of neighbours that share an engine, and return this rank's. All ranks call it."""
    groups: Any = dist  # its types say nothing of this
    listed = [list(range(first, first + parts)) for first in range(0, ranks, parts)]
    own, _ = groups.new_subgroups_by_enumeration(listed, timeout=timedelta(seconds=timeout_s), backend=kind)
    return own
