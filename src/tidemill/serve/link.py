"""Between the asyncio side, where clients are, and the thread that steps the engine. Requests and cancellations cross
in one queue, tokens and finished samples in another, each handed over once a step at most.

The asyncio side takes what it was handed at a pace of its own: where many clients stream, tokens of several steps go
out together, so that the server never takes more than `SHARE` of the time from the engine.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from typing import Any

import numpy as np

from tidemill.rollout.engine import Completion, Fresh, Request, RolloutEngine, Streams

SHARE = 0.06  # of the time that goes to the server's thread before it begins to wait and write more at once
LONGEST_WAIT_S = 0.4
IDLE_S = 0.05
MOST_SAMPLES, MOST_IDS = 1 << 12, (1 << 40) - 1  # of one request; ids that streams are numbered by


_ids = count(1 << 56)  # of all links: an id is one request, whichever engine answers


class EngineGone(Exception):
    """The engine's thread has ended: what was asked will not be answered."""


@dataclass(slots=True, eq=False)
class Answering:
    """One request as the asyncio side sees it. `tokens` and `logprobs` are of each sample, as far as they were told."""

    request: Request
    tokens: list[list[int]]
    logprobs: list[list[float]]
    done: list[Completion | None]
    versions: tuple[int, int] = (0, 0)
    failure: BaseException | None = None
    on_whole: Callable[[Answering], None] | None = None  # called once all samples are done, before anybody wakes
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @staticmethod
    def of(request: Request) -> Answering:
        n = request.n
        return Answering(request, [[] for _ in range(n)], [[] for _ in range(n)], [None] * n)

    @property
    def is_whole(self) -> bool:
        return all(completion is not None for completion in self.done)

    def wake(self) -> None:
        self._changed.set()

    async def changed(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    async def whole(self) -> list[Completion]:
        while not self.is_whole:
            if self.failure is not None:
                raise self.failure
            await self.changed()
        return [completion for completion in self.done if completion is not None]


class EngineLink:
    """`engine` is touched by `exchange` and `hand_over` alone, which its own thread calls around each step."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.is_streaming = isinstance(engine, Streams)
        self._arrived = threading.Event()
        self._asked: deque[tuple[str, Any]] = deque()
        self._made: deque[Fresh | Completion] = deque()
        self._answering: dict[int, Answering] = {}  # by the engine's id of the request
        self._samples = 0  # of these requests
        self._streams: dict[int, tuple[Answering, int]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_due = False  # the loop was told that something waits for it
        self._since, self._used = 0.0, 0.0
        self._error: BaseException | None = None
        self.steps = 0
        if isinstance(engine, Streams):
            engine.on_tokens = self._made.append

    # The engine's thread

    def exchange(self) -> None:
        """Give the engine what was asked since the last step."""
        while self._asked:
            what, given = self._asked.popleft()
            if what == "ask":
                self.engine.submit(given)
            elif what == "cancel":
                self.engine.cancel(given)
            else:
                given()

    def works(self) -> bool:
        """Make one step; false where there is nothing to do."""
        self.exchange()
        if not self.engine.has_work:
            return False
        self.engine.step()
        self.hand_over()
        return True

    def hand_over(self) -> None:
        """Tell the asyncio side that something was made, unless it knows."""
        self.steps += 1
        if self._made and not self._is_due and self._loop is not None:
            self._is_due = True
            self._call_soon(self._look)

    def notice(self) -> None:
        """End a wait, from any thread."""
        self._arrived.set()

    def share_arrivals(self, other: EngineLink) -> None:
        """Have whoever waits at `other` hear of what is asked here."""
        self._arrived = other._arrived

    def rest(self) -> None:
        """Forget that something was asked: what comes from now on ends the next wait."""
        self._arrived.clear()

    def wait(self, timeout_s: float = IDLE_S) -> bool:
        """Wait until something is asked."""
        return self._arrived.wait(timeout_s)

    @property
    def has_asked(self) -> bool:
        return bool(self._asked)

    def fail(self, error: BaseException) -> None:
        """End every request: the engine is gone."""
        self._error = error
        self._call_soon(self._fail_all)

    def _call_soon(self, function: Callable[[], None]) -> None:
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the server has ended
            self._is_due = False

    # The asyncio side

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def new_id(self) -> int:
        """Return a number for a request; those of rows and evaluations are smaller."""
        return next(_ids)

    def ask(self, request: Request, streams: bool, on_whole: Callable[[Answering], None] | None = None) -> Answering:
        if self._error is not None:
            raise EngineGone(str(self._error)) from self._error
        stream = (request.id & MOST_IDS) * MOST_SAMPLES if streams and self.is_streaming else None
        request = replace(request, stream=stream, on_done=self._made.append)
        answering = Answering.of(request)
        answering.on_whole = on_whole
        self._answering[request.id] = answering
        self._samples += request.n
        if stream is not None:
            self._streams |= {stream + k: (answering, k) for k in range(request.n)}
        self._asked.append(("ask", request))
        self._arrived.set()
        return answering

    def cancel(self, answering: Answering) -> None:
        """Stop what nobody waits for any more."""
        if not answering.is_whole and answering.request.id in self._answering:
            self._asked.append(("cancel", answering.request.id))
            self._arrived.set()

    def call(self, function: Callable[[], None]) -> None:
        """Have the engine's thread call something between two steps."""
        self._asked.append(("call", function))
        self._arrived.set()

    @property
    def open_requests(self) -> int:
        return len(self._answering)

    @property
    def open_samples(self) -> int:
        return self._samples

    def _look(self) -> None:
        """Take what was made, now or once the server's share of the time allows."""
        assert self._loop is not None
        now, used = time.monotonic(), time.thread_time()
        wait = min((used - self._used) / SHARE - (now - self._since), LONGEST_WAIT_S)
        if wait > 0.001 and len(self._streams) > 1:
            self._loop.call_later(wait, self._take)
        else:
            self._take()

    def _take(self) -> None:
        self._since, self._used = time.monotonic(), time.thread_time()
        self._is_due = False
        fresh: list[Fresh] = []
        while self._made:
            made = self._made.popleft()
            if isinstance(made, Fresh):
                fresh.append(made)
            else:
                self._tell(fresh)
                fresh = []
                self._end(made)
        self._tell(fresh)

    def _tell(self, fresh: list[Fresh]) -> None:
        if not fresh:
            return
        streams = np.concatenate([f.streams for f in fresh])
        order = np.argsort(streams, kind="stable")
        tokens = np.concatenate([f.tokens for f in fresh])[order].tolist()
        logprobs = np.concatenate([f.logprobs for f in fresh])[order].tolist()
        streams = streams[order]
        starts = np.concatenate([[0], np.flatnonzero(np.diff(streams)) + 1, [len(streams)]]).tolist()
        for first, last in pairwise(starts):
            found = self._streams.get(int(streams[first]))
            if found is not None:
                answering, k = found
                answering.tokens[k] += tokens[first:last]
                answering.logprobs[k] += logprobs[first:last]
                answering.wake()

    def _end(self, completion: Completion) -> None:
        answering = self._answering.get(completion.request.id)
        if answering is None:
            return
        k = completion.index
        answering.done[k] = completion
        answering.tokens[k], answering.logprobs[k] = completion.tokens, completion.logprobs
        if answering.is_whole:
            del self._answering[completion.request.id]
            self._samples -= answering.request.n
            if answering.request.stream is not None:
                for k in range(answering.request.n):
                    self._streams.pop(answering.request.stream + k, None)
            if answering.on_whole is not None:
                answering.on_whole(answering)
        answering.wake()

    def _fail_all(self) -> None:
        for answering in self._answering.values():
            answering.failure = EngineGone(str(self._error))
            answering.wake()
        self._answering.clear()
        self._samples = 0
        self._streams.clear()


class EngineThread:
    """Steps the engines, one after the other, for as long as the server lives."""

    def __init__(self, links: Sequence[EngineLink]) -> None:
        self.links = links
        for link in links[1:]:
            link.share_arrivals(links[0])
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._is_ending:
                self.links[0].rest()
                working = [link for link in self.links if link.works()]
                if not working:
                    self.links[0].wait()
        except BaseException as error:
            for link in self.links:
                link.fail(error)
            raise

    def end(self, timeout_s: float = 10.0) -> None:
        self._is_ending = True
        self.links[0].call(lambda: None)
        self._thread.join(timeout_s)
