"""One rank's engine among data-parallel replicas: each request is served by one of them, and all hear how it ended.

Every rank is given the same calls in the same order. Whose request it is follows from what is unfinished where, which
all know; so nobody asks anybody. What a step finished is told to all ranks, because the first of them gives it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import msgspec
import numpy as np

from tidemill.batch import Array
from tidemill.rollout.engine import Completion, Finish, Fresh, OnTokens, Partial, Request, run_callbacks
from tidemill.rollout.native.check import find_problem, refused
from tidemill.rollout.native.engine import NativeEngine
from tidemill.rollout.native.ranks import share
from tidemill.rollout.native.ranks.experts import ExpertBalance, SpreadExperts
from tidemill.rollout.native.ranks.links import Links


class Spread(Protocol):
    """A runner whose experts lie on several ranks, by the names of their modules."""

    spread: dict[str, SpreadExperts]

    def stand_by(self) -> None: ...


@dataclass(slots=True)
class _Taken:
    """A request with something unfinished, here or elsewhere."""

    request: Request
    home: int  # the replica that serves it
    left: int


@dataclass(frozen=True, slots=True)
class _Home:
    """Of a paused sample: whose cache may still have its pages."""

    replica: int


class _Sample(msgspec.Struct, array_like=True):
    """A sample on its way to the other ranks, numbers as raw bytes. Stages but the first tell its routes alone."""

    taken: int
    index: int
    tokens: bytes = b""
    logprobs: bytes = b""
    versions: bytes | None = None  # None: of a later stage
    finish: str | None = None  # None: unfinished
    error: str | None = None
    kept: bytes | None = None
    routes: bytes | None = None  # through the layers of one stage
    inputs: int = 0  # tokens that have a route
    tops: list[list[tuple[int, float]]] | None = None


class _Tokens(msgspec.Struct, array_like=True):
    streams: bytes
    tokens: bytes
    logprobs: bytes
    kept: bytes | None


class _Told(msgspec.Struct, array_like=True):
    """What one rank says after a step."""

    samples: list[_Sample]
    fresh: list[_Tokens] = []


_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(_Told).decode


class Replicas:
    """Implements `RolloutEngine` over `inner`, which serves this rank's replica."""

    def __init__(self, inner: NativeEngine, links: Links) -> None:
        self.inner, self.links = inner, links
        own = share.of(inner.model)
        spread = cast(Spread, inner.runner).spread
        self.balance = ExpertBalance(links, own, spread) if own.slots else None  # where experts lie next
        self.on_tokens: OnTokens | None = None
        self._taken: dict[int, _Taken] = {}
        self._count = 0
        self._load = [0] * links.grid.dp  # samples unfinished in each replica
        self._fresh: list[Fresh] = []
        self._held: list[Completion] = []
        inner.on_tokens = self._fresh.append

    @property
    def version(self) -> int:
        return self.inner.version

    @property
    def has_work(self) -> bool:
        return bool(self._taken or self._held)

    def submit(self, request: Request) -> None:
        if problem := find_problem(request, self.inner.limits):
            self._held += refused(request, problem)
            return
        number = self._take(request, request.n)
        if self._taken[number].home == self.links.at.dp:
            self.inner.submit(replace(request, user=number, on_done=None))

    def _take(self, request: Request, count: int, home: int | None = None) -> int:
        if home is None:
            home = min(range(len(self._load)), key=lambda d: (self._load[d], d))
        self._count += 1
        self._taken[self._count] = _Taken(request, home, count)
        self._load[home] += count
        return self._count

    def step(self) -> list[Completion]:
        passes = self.inner.passes
        made = self.inner.step()
        if self.inner.passes == passes:
            cast(Spread, self.inner.runner).stand_by()
        done, self._held = self._held, []
        for sample, routes in self._exchange([_of_completion(c) for c in made]):
            done.append(_completion(sample, self._taken[sample.taken].request, routes))
            self._drop(sample.taken)
        return run_callbacks(done, self._held)

    def _drop(self, number: int) -> None:
        taken = self._taken[number]
        taken.left -= 1
        self._load[taken.home] -= 1
        if not taken.left:
            del self._taken[number]

    def pause(self) -> list[Partial]:
        """As any engine's; what had ended already is given by the next step."""
        found = []
        for sample, _ in self._exchange([_of_partial(p) for p in self.inner.pause()]):
            found.append(_partial(sample, self._taken[sample.taken]))
            self._drop(sample.taken)
        return found

    def resume(self, partials: Sequence[Partial]) -> None:
        own = []
        for p in partials:
            number = self._take(p.request, 1, p.cache.replica if isinstance(p.cache, _Home) else None)
            if self._taken[number].home == self.links.at.dp:
                own.append(replace(p, request=replace(p.request, user=number, on_done=None), cache=None))
        self.inner.resume(own)

    def cache_counts(self) -> dict[str, int]:
        """Of this rank."""
        return self.inner.cache_counts()

    def cancel(self, request_id: int) -> None:
        self.inner.cancel(request_id)

    def load(self, weights: Any, version: int) -> None:
        self.inner.load(weights, version)
        if self.balance is not None:
            self.balance.take_up()

    def sleep(self) -> None:
        self.inner.sleep()

    def wake(self) -> None:
        self.inner.wake()

    # What ranks tell each other

    def _exchange(self, own: list[_Sample]) -> list[tuple[_Sample, Array | None]]:
        """Everybody's samples, each with its routes through the layers of all stages."""
        if self.links.at.pp:
            own = [_Sample(s.taken, s.index, routes=s.routes) for s in own if s.routes is not None]
            self._fresh.clear()
        told = _Told(own, [_of_fresh(f) for f in self._fresh])
        self._fresh.clear()
        heard = [_decode(x) for x in self.links.gather(_encode(told) if told.samples or told.fresh else b"") if x]
        if self.on_tokens is not None:
            for tokens in (t for one in heard for t in one.fresh):
                self.on_tokens(_fresh(tokens))
        samples = [s for one in heard for s in one.samples]
        routes: dict[tuple[int, int], list[bytes]] = {}
        for s in samples:
            if s.routes is not None:
                routes.setdefault((s.taken, s.index), []).append(s.routes)
        whole = [s for s in samples if s.versions is not None]
        return [(s, _joined(routes.get((s.taken, s.index)), s)) for s in whole]


def _joined(parts: list[bytes] | None, sample: _Sample) -> Array | None:
    """Routes of all stages: (inputs · layers · k)."""
    if parts is None:
        return None
    inputs = sample.inputs
    return np.concatenate([np.frombuffer(part, np.int16).reshape(inputs, -1) for part in parts], 1).reshape(-1)


def _of_completion(c: Completion) -> _Sample:
    versions = _bytes(c.versions, np.int64)
    routes = None if c.routes is None else _bytes(c.routes, np.int16)
    inputs = len(c.request.prompt) + len(c.tokens) - 1
    kept = None if c.kept is None else _bytes(c.kept, np.float64)
    made = _bytes(c.tokens, np.int32), _bytes(c.logprobs, np.float64), versions
    return _Sample(c.request.user, c.index, *made, c.finish, c.error, kept, routes, inputs, c.tops)


def _of_partial(p: Partial) -> _Sample:
    kept = None if p.kept is None else _bytes(p.kept, np.float64)
    made = _bytes(p.tokens, np.int32), _bytes(p.logprobs, np.float64), _bytes(p.versions, np.int64)
    return _Sample(p.request.user, p.index, *made, kept=kept)


def _completion(s: _Sample, request: Request, routes: Array | None) -> Completion:
    finish, tops = cast(Finish, s.finish), s.tops
    made = _list(s.tokens, np.int32), _list(s.logprobs, np.float64), _list(s.versions or b"", np.int64)
    kept = None if s.kept is None else _list(s.kept, np.float64)
    return Completion(request, s.index, *made, finish, s.error, kept, routes, tops=tops)


def _partial(s: _Sample, taken: _Taken) -> Partial:
    made = _list(s.tokens, np.int32), _list(s.logprobs, np.float64), _list(s.versions or b"", np.int64)
    kept = None if s.kept is None else _list(s.kept, np.float64)
    return Partial(taken.request, s.index, *made, kept, cache=_Home(taken.home))


def _of_fresh(f: Fresh) -> _Tokens:
    kept = None if f.kept is None else _bytes(f.kept, np.float32)
    return _Tokens(_bytes(f.streams, np.int64), _bytes(f.tokens, np.int64), _bytes(f.logprobs, np.float32), kept)


def _fresh(t: _Tokens) -> Fresh:
    kept = None if t.kept is None else np.frombuffer(t.kept, np.float32)
    columns = (
        np.frombuffer(t.streams, np.int64),
        np.frombuffer(t.tokens, np.int64),
        np.frombuffer(t.logprobs, np.float32),
    )
    return Fresh(*columns, kept)


def _bytes(values: Any, dtype: Any) -> bytes:
    return np.asarray(values, dtype).tobytes()


def _list(data: bytes, dtype: Any) -> list[Any]:
    found: list[Any] = np.frombuffer(data, dtype).tolist()
    return found
