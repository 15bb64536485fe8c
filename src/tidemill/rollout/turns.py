"""An engine that converses: around any rollout engine, it plays each sample against its environment to the end.

A request with a task comes back as one completion per sample, whatever the turns in between. Its tokens are those that
were sampled and those that the environment's answers became, joined, never tokenised again; `mask` tells them apart.
Each turn is a new request whose prompt is the conversation so far: an engine that reuses prefixes reads what is new.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from tidemill.chat.answer import Answer
from tidemill.environment.api import Closes, Environment, Interrupts, Maker, Played, Task, Turn, UsesTools
from tidemill.environment.registry import find
from tidemill.environment.speech import Speech
from tidemill.errors import DataError, PlayError
from tidemill.recipe.config import EnvironmentSettings as Settings
from tidemill.rollout.engine import (
    Completion,
    Finish,
    Partial,
    Request,
    RolloutEngine,
    cache_counts,
    run_callbacks,
    token_limit,
)
from tidemill.rollout.native.check import RequestLimits, find_problem
from tidemill.rollout.transcript import Transcript

PATIENCE_S = 0.05  # between looks at environments that think, when no model works
ANY = RequestLimits(
    vocab=1 << 31, max_len=1 << 62, cache_tokens=1 << 62, has_tokenizer=True
)  # no engine's: what nobody takes


@dataclass(slots=True, eq=False, kw_only=True)
class Conversation(Transcript):
    """One sample under way."""

    request: Request  # the whole conversation's, as it was submitted
    index: int
    environment: Environment
    played: Played = field(default_factory=Played)
    turn_id: int = 0  # of the engine's request under way
    is_cancelled: bool = False
    strays: int = 0  # places for images that the model wrote itself

    @property
    def room(self) -> int:
        return token_limit(self.request, self.index) - len(self.tokens)


@dataclass(slots=True, eq=False)
class Thinking:
    conversation: Conversation
    said: Answer | None  # for an environment with tools
    has_ended: bool  # the model closed its message itself
    answer: Future[Turn]
    since: float


class TurnsEngine:
    """`RolloutEngine` over another one; requests without a task pass through."""

    def __init__(self, inner: RolloutEngine, settings: Settings, speech: Speech, eos_ids: Sequence[int]) -> None:
        self.inner, self.settings, self.speech, self.eos_ids = inner, settings, speech, frozenset(eos_ids)
        self.make: Maker = find(settings.name)
        self.thinking: list[Thinking] = []
        self.under_way: dict[int, Conversation] = {}  # by the id of the object: conversations are unlike each other
        self.paused: dict[tuple[int, int], Partial] = {}  # by the conversation's request and sample
        self.ready: list[Completion] = []
        self.executor: Executor = ThreadPoolExecutor(settings.workers, "environment") if settings.workers else Here()

    @property
    def version(self) -> int:
        return self.inner.version

    @property
    def has_work(self) -> bool:
        return self.inner.has_work or bool(self.thinking) or bool(self.ready)

    def submit(self, request: Request) -> None:
        if request.task is None or find_problem(
            replace(request, tiles=()), ANY
        ):  # the engine says what is wrong with it
            self.inner.submit(request)
            return
        seed = turn_id(request.id, request.sampling.seed, 0)
        task = replace(request.task, prompt=self.speech.text(request.prompt), seed=seed)
        shown = request.tiles[-1].image + 1 if request.tiles else 0
        conversations = [
            Conversation(
                request=request, index=k, environment=self._begin(task), before=len(request.prompt), images=shown
            )
            for k in range(request.n)
        ]
        self.under_way |= {id(c): c for c in conversations}
        limits = [self._turn_limit(c) for c in conversations]
        for conversation in conversations:
            conversation.turn_id = request.id
        self.inner.submit(self._turn(request.id, request.prompt, conversations, limits))

    def step(self) -> list[Completion]:
        made: list[Completion] = []
        if self.inner.has_work:
            made = self.inner.step()
        elif self.thinking:
            wait([t.answer for t in self.thinking], timeout=PATIENCE_S, return_when=FIRST_COMPLETED)
        done, self.ready = self.ready, []
        for completion in made:
            done += self._spoken(completion)
        done += self._answers()
        return run_callbacks(done, self.ready)  # of whole conversations; the engine has called back for the rest

    def _begin(self, task: Task) -> Environment:
        try:
            environment = self.make(task, **self.settings.args)
            environment.reset()
        except Exception as error:
            raise PlayError(
                f"environment {self.settings.name!r} could not begin with {task.where or 'a task'}: "
                f"{type(error).__name__}: {error}",
                "see environment.args and the row's columns",
            ) from error
        return environment

    def _turn(self, id: int, prompt: Sequence[int], who: list[Conversation], limits: list[int]) -> Request:
        sampling = who[0].request.sampling
        if isinstance(who[0].environment, Interrupts) and not self._uses_tools(who[0].environment):
            sampling = replace(sampling, stop_strings=(*sampling.stop_strings, *who[0].environment.stop))
        shown, strays = who[0].request.tiles + who[0].tiles, who[0].strays
        return Request(id, prompt, sampling, n=len(who), limits=limits, tiles=shown, strays=strays, user=who)

    def _turn_limit(self, conversation: Conversation) -> int:
        return min(conversation.room, self.settings.max_turn_tokens or conversation.room)

    # -- turns ---------------------------------------------------------------------------------------------------

    def _spoken(self, completion: Completion) -> list[Completion]:
        """The model has spoken: the environment thinks."""
        if not _is_ours(completion.request):
            return [completion]
        conversation: Conversation = completion.request.user[completion.index]
        conversation.speak(completion)
        if self.speech.pictures is not None:
            conversation.strays += completion.tokens.count(self.speech.pictures.view.token)
        if completion.finish in ("error", "cancelled"):
            return [self._finish(conversation, completion.finish, completion.error)]
        has_ended = bool(completion.tokens) and completion.tokens[-1] in self.eos_ids
        environment, said = conversation.environment, None
        if self._uses_tools(environment):
            said = self.speech.said(completion.request.prompt, completion.tokens)
            answer = self.executor.submit(environment.use, said)
        else:
            answer = self.executor.submit(environment.step, self.speech.text(completion.tokens))
        self.thinking.append(Thinking(conversation, said, has_ended, answer, time.monotonic()))
        return []

    def _uses_tools(self, environment: Environment) -> TypeGuard[UsesTools]:
        """Whether its calls have the form of the chat template."""
        return (
            self.speech.is_chat and isinstance(environment, UsesTools) and not getattr(environment, "is_plain", False)
        )

    def _answers(self) -> list[Completion]:
        """Of environments that have answered or have thought too long."""
        done, still = [], []
        for thinking in self.thinking:
            if thinking.answer.done():
                done += self._heard(thinking)
            elif time.monotonic() - thinking.since > self.settings.timeout_s:
                done.append(self._fail(thinking.conversation, f"gave no answer in {self.settings.timeout_s:g} s"))
            else:
                still.append(thinking)
        self.thinking = still
        return done

    def _heard(self, thinking: Thinking) -> list[Completion]:
        """The environment has answered: the conversation ends, or the model speaks again."""
        conversation = thinking.conversation
        if conversation.is_cancelled:
            return [self._finish(conversation, "cancelled")]
        error = thinking.answer.exception()
        if error is not None:
            return [self._fail(conversation, f"raised {type(error).__name__}: {error}")]
        turn = thinking.answer.result()
        if not isinstance(turn, Turn):
            return [self._fail(conversation, f"answered with {turn!r:.80}, not with a Turn")]
        try:
            conversation.played = conversation.played.after(turn)
            conversation.gain(float(turn.reward))
            tokens = [] if turn.is_done else self._heard_tokens(turn, thinking)
            shown = self.speech.tiles(turn, tokens) if tokens else ()
        except DataError as refusal:
            return [self._fail(conversation, f"cannot be heard: {refusal.message}")]
        except (TypeError, ValueError, AttributeError) as error:  # a text that is none, a reward that is no number
            return [self._fail(conversation, f"answered with {turn!r:.80}: {error}")]
        if turn.is_done:
            return [self._finish(conversation, "stop")]
        if conversation.played.turns >= self.settings.max_turns or len(tokens) >= conversation.room:
            return [self._finish(conversation, "length")]
        conversation.hear(tokens, self.version, shown)
        self._go_on(conversation)
        return []

    def _heard_tokens(self, turn: Turn, thinking: Thinking) -> list[int]:
        return self.speech.heard(turn, thinking.said, has_ended=thinking.has_ended)

    def _go_on(self, conversation: Conversation) -> None:
        request = conversation.request
        conversation.turn_id = turn_id(request.id, conversation.index, conversation.played.turns)
        so_far = [*request.prompt, *conversation.tokens]
        limits = [self._turn_limit(conversation)]
        self.inner.submit(self._turn(conversation.turn_id, so_far, [conversation], limits))

    def _fail(self, conversation: Conversation, why: str) -> Completion:
        conversation.played = replace(conversation.played, error=self._failure(why))
        return self._finish(conversation, "stop")

    def _failure(self, why: str) -> str:
        """In words, unless the run is to end by it."""
        message = f"environment {self.settings.name!r} {why}"
        if self.settings.on_error == "fail":
            raise PlayError(message, "mend the environment, or set environment.on_error=end")
        return message

    def _close(self, conversation: Conversation) -> None:
        if not isinstance(conversation.environment, Closes):
            return
        try:
            conversation.environment.close()
        except Exception as error:
            why = self._failure(f"raised {type(error).__name__} when it was closed: {error}")
            conversation.played = replace(conversation.played, error=conversation.played.error or why)

    def _finish(self, conversation: Conversation, finish: Finish, error: str | None = None) -> Completion:
        self.under_way.pop(id(conversation), None)
        self._close(conversation)
        return conversation.completion(conversation.request, conversation.index, finish, error, conversation.played)

    # -- control -------------------------------------------------------------------------------------------------

    def cancel(self, request_id: int) -> None:
        mine = [c for c in self.under_way.values() if c.request.id == request_id]
        for conversation in mine:
            conversation.is_cancelled = True
            if self.paused.pop((request_id, conversation.index), None) is not None:  # nobody else would end it
                self.ready.append(self._finish(conversation, "cancelled"))
        for turn in {c.turn_id for c in mine} or {request_id}:
            self.inner.cancel(turn)

    def cache_counts(self) -> dict[str, int]:
        return cache_counts(self.inner)

    def pause(self) -> list[Partial]:
        """What was said so far. The environments stay here, so the samples go on in this engine only."""
        while self.thinking:
            wait([t.answer for t in self.thinking], timeout=PATIENCE_S)
            self.ready += self._answers()
        outer = []
        for partial in self.inner.pause():
            if not _is_ours(partial.request):
                outer.append(partial)
                continue
            c: Conversation = partial.request.user[partial.index]
            self.paused[c.request.id, c.index] = partial
            whole = (c.tokens + partial.tokens, c.logprobs + partial.logprobs, c.versions + partial.versions)
            kept = c.kept + (partial.kept or [0.0] * len(partial.tokens)) if c.is_cut or partial.kept else None
            outer.append(Partial(c.request, c.index, *whole, kept))
        return outer

    def resume(self, partials: Sequence[Partial]) -> None:
        for partial in partials:  # all of them, before any goes on
            if partial.request.task is not None and (partial.request.id, partial.index) not in self.paused:
                raise PlayError(
                    f"sample {partial.index} of request {partial.request.id} was paused elsewhere, where its "
                    "environment is",
                    "resume a conversation in the engine that began it",
                )
        self.inner.resume([p if p.request.task is None else self.paused.pop((p.request.id, p.index)) for p in partials])

    def load(self, weights: Any, version: int) -> None:
        self.inner.load(weights, version)

    def sleep(self) -> None:
        self.inner.sleep()

    def wake(self) -> None:
        self.inner.wake()


class Here(Executor):
    """Answers at once, in this thread: for environments that take no time, and the same in every run."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def turn_id(request: int, index: int, turn: int) -> int:
    """A turn's own random stream, the same in every run."""
    digest = hashlib.blake2b(f"{request} {index} {turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def _is_ours(request: Request) -> bool:
    return isinstance(request.user, list) and bool(request.user) and isinstance(request.user[0], Conversation)
