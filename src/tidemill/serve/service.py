"""What the endpoints share: the models by name, who asks, and a request on its way to an engine and back."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tidemill.rollout.engine import Completion, Grammar, Request, Sampling
from tidemill.serve.asking import Drawing, Refused, choices_of, sampling
from tidemill.serve.link import Answering, EngineGone, EngineLink
from tidemill.serve.metrics import Metrics
from tidemill.serve.talk import Memory, Talk
from tidemill.tiles import Tiles

SERVED = object()  # marks requests of the endpoint among others of the same engine
MOST_MEMORIES = 1024  # sessions whose conversations are remembered at once
MOST_REMEMBERED = 1 << 24  # tokens of all of them


@dataclass(slots=True)
class Served:
    """A model by the name that clients ask for."""

    name: str
    talk: Talk
    link: EngineLink
    window: int
    eos_ids: frozenset[int]
    root: str = ""
    parent: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def version(self) -> int:
        return self.link.engine.version

    def check_length(self, characters: int, field: str = "messages") -> None:
        """Refuse a text that cannot fit before seconds are spent on it."""
        if characters > self.window * self.talk.longest:
            raise Refused(
                f"the prompt has {characters} characters, and the model's window is {self.window} tokens",
                field,
                code="context_length_exceeded",
            )


class Session:
    """Who asks. Without more, a client whose requests are each by themselves; with `memory`, a conversation."""

    base: Sampling | None = None  # whose temperature and cuts hold, whatever a request says
    memory: Memory | None = None

    def admit(self, prompt: Sequence[int]) -> int | None:
        """How many tokens may be made for a prompt, beside the window's limit. Raise Refused where none may."""
        return None

    def draw_id(self, prompt: Sequence[int], seed: int | None) -> int | None:
        """The number of a request's random stream: the same prompt with the same seed gives the same tokens."""
        return None if seed is None else digest(prompt)

    def began(self, answering: Answering) -> None:
        """Hear that a request is on its way."""

    def ended(self, answering: Answering, admitted: int) -> None:
        """Hear that all samples of a request are done."""


def digest(tokens: Sequence[int], *more: int) -> int:
    hashed = hashlib.blake2b(np.asarray([*tokens, *more], np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(hashed, "big") >> 2


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of an answer a client wants beside its text."""

    max_tokens: int | None
    streams: bool = False
    grammar: Grammar | None = None
    tops: int = 0


class Service:
    def __init__(
        self,
        models: Sequence[Served],
        metrics: Metrics | None = None,
        most_open: int = 4096,
        takes_any_name: bool = False,
    ) -> None:
        """`most_open`: samples that wait or run at once; more are told to come back. `takes_any_name`: whatever a
        client calls the model, it is the first one."""
        self.models = {model.name: model for model in models}
        self.default = models[0]
        self.metrics = metrics or Metrics()
        self.most_open, self.takes_any_name = most_open, takes_any_name
        self._memories: OrderedDict[bytes, Memory] = OrderedDict()

    def model(self, name: str) -> Served:
        if not name or (self.takes_any_name and name not in self.models):
            return self.default
        if name not in self.models:
            there = ", ".join(self.models)
            raise Refused(f"there is no model {name!r}; there are {there}", "model", 404, "model_not_found")
        return self.models[name]

    def visitor(self, name: str | None) -> Session:
        """`name`: of a conversation that the client wants remembered."""
        session = Session()
        if name:
            key = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
            session.memory = self._memories.setdefault(key, Memory(1 << 18))
            self._memories.move_to_end(key)
            while len(self._memories) > 1 and (
                len(self._memories) > MOST_MEMORIES or self.remembered_tokens > MOST_REMEMBERED
            ):
                self._memories.popitem(last=False)
        return session

    @property
    def remembered_tokens(self) -> int:
        return sum(memory.size for memory in self._memories.values())

    def ask(
        self, session: Session, model: Served, prompt: list[int], asked: Drawing, wanted: Wanted, tiles: Tiles = ()
    ) -> Answering:
        """Send a request on its way. `tiles`: what the prompt shows."""
        count = choices_of(asked)
        if sum(m.link.open_samples for m in self.models.values()) + count > self.most_open:
            raise Refused("too many requests wait already: come back later", status=429, code="rate_limit_exceeded")
        room = model.window - len(prompt)
        if room < 1:
            raise Refused(
                f"the prompt has {len(prompt)} tokens, and the model's window is {model.window}",
                "messages",
                code="context_length_exceeded",
            )
        if wanted.max_tokens is not None and wanted.max_tokens < 1:
            raise Refused(f"max_tokens is {wanted.max_tokens}; at least one token must be made", "max_tokens")
        admitted = session.admit(prompt)
        most = min(x for x in (room, admitted, wanted.max_tokens) if x is not None)
        how = sampling(asked, most, session.base)
        how = replace(how, grammar=wanted.grammar, top_logprobs=wanted.tops)
        request = Request(
            model.link.new_id(),
            prompt,
            how,
            n=count,
            draw_id=session.draw_id(prompt, asked.seed),
            tiles=tiles,
            user=SERVED,
        )
        began = time.monotonic()

        def whole(answering: Answering) -> None:
            session.ended(answering, most)
            self.metrics.answered(model.name, answering, time.monotonic() - began)

        try:
            answering = model.link.ask(request, wanted.streams, whole)
        except EngineGone as gone:
            raise Refused(f"the engine has ended: {gone}", status=503) from gone
        session.began(answering)
        return answering


async def whole(answering: Answering) -> list[Completion]:
    """All samples of a request, or Refused."""
    try:
        done = await answering.whole()
    except EngineGone as gone:
        raise Refused(f"the engine has ended: {gone}", status=503) from gone
    for completion in done:
        check(completion)
    return done


def check(completion: Completion) -> None:
    if completion.finish == "error":
        is_ours = (completion.error or "").startswith("the model gave")
        raise Refused(completion.error or "the engine gave up", status=500 if is_ours else 400)
    if completion.finish == "cancelled":
        raise Refused("the request was cancelled", status=503)


@dataclass(frozen=True, slots=True)
class News:
    """What is new of one sample; `completion` once it is whole."""

    index: int
    tokens: list[int]
    logprobs: list[float]
    completion: Completion | None


async def news(answering: Answering) -> AsyncIterator[list[News]]:
    """What is made, as it is made; ends when all samples are whole."""
    seen, told = [0] * len(answering.done), [False] * len(answering.done)
    while not all(told):
        await answering.changed()
        if answering.failure is not None:
            raise Refused(f"the engine has ended: {answering.failure}", status=503)
        found: list[News] = []
        for k, completion in enumerate(answering.done):
            tokens, logprobs = answering.tokens[k][seen[k] :], answering.logprobs[k][seen[k] :]
            if (tokens or completion is not None) and not told[k]:
                seen[k] += len(tokens)
                told[k] = completion is not None
                if completion is not None:
                    check(completion)
                found.append(News(k, tokens, logprobs, completion))
        if found:
            yield found


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def usage(prompt: int, made: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
