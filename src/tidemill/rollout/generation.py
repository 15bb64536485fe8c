"""The native engine for any program: text or token ids in, answers out; a transformers model is read in place.

    engine = Engine(model, tokenizer)
    [[answer]] = engine.generate(["How many legs have two spiders?"])

Needs torch and transformers, and no other part of Tidemill: no recipe, no run.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from tidemill.chat.answer import Schema
from tidemill.environment.api import Task
from tidemill.errors import ConfigError, ModelError, did_you_mean
from tidemill.models.attention import registry as attention
from tidemill.models.mixture import experts
from tidemill.models.modes import at_rest
from tidemill.models.recurrent import mixers
from tidemill.rollout.engine import Completion, Fresh, Request, RolloutEngine, Sampling
from tidemill.rollout.native.engine import NativeEngine
from tidemill.rollout.native.forward import latent, lean
from tidemill.rollout.native.forward.dense import DenseRunner
from tidemill.rollout.native.forward.runner import PlainRunner
from tidemill.rollout.native.trial import try_rollout
from tidemill.rollout.pieces import Piece, Pieces

T = TypeVar("T")
Asked = Future[list[Completion]]  # a request's samples in order

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # text, token ids, or the messages of a conversation
CONCURRENT = 256
LONGEST = 4096  # tokens of prompt and answer, unless the model's window is shorter or the caller asks for more
CACHE_TOKENS = 1 << 16  # of keys and values; sequences beyond them wait, or are read again


@dataclass(frozen=True, slots=True)
class Answer:
    """One sampled answer. `tokens` are exactly those that were sampled, an end token included."""

    text: str
    tokens: list[int]
    logprobs: list[float]  # of each token, at the sampling temperature
    finish: str  # stop: it ended by itself; length: it reached the limit; cancelled: the caller left
    prompt_tokens: list[int]
    mask: list[int] | None = None  # in a conversation with an environment: 0 where the environment made the token
    reward: float | None = None  # what the environment gave


class Engine:
    """Generates with a transformers model, whose tensors are read in place and never changed.

    `model` is a causal language model object, a folder, a known name or a hub id. Between two calls the model may be
    trained, moved or given other weights; call `refresh()` after weights changed, so that nothing is reused that old
    weights computed. Calls from several threads and coroutines share the same steps.

    `concurrent` sequences run at once, each of at most `max_length` tokens; `cache_tokens` bounds the memory of keys
    and values, and `cache_on_host_gb` the host memory that takes those of samples which had to make room.
    `reuse_prefix` lets a prompt that begins like an earlier one read only what is new.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        device: str = "auto",
        concurrent: int = CONCURRENT,
        max_length: int | None = None,
        cache_tokens: int | None = None,
        cache_on_host_gb: float = 0.0,
        reuse_prefix: bool = True,
    ) -> None:
        if isinstance(model, str | Path):
            model, tokenizer = _opened(model, tokenizer, device)
        self.model, self.tokenizer = model, tokenizer
        window = getattr(model.config.get_text_config(), "max_position_embeddings", None) or LONGEST
        self.max_length = min(window, max_length or LONGEST)
        self._attention = _tried(model)
        self.tools: Sequence[Schema] = ()  # that prompts tell the model of
        with borrowed(model, self._attention):
            self._native = NativeEngine(
                model,
                eos_ids=end_tokens(model, tokenizer),
                tokenizer=tokenizer,
                max_seqs=concurrent,
                max_len=self.max_length,
                cache_tokens=cache_tokens or max(CACHE_TOKENS, self.max_length),
                host_bytes=int(cache_on_host_gb * 1e9),
                reuse_prefix=reuse_prefix,
            )
            try_rollout(self._native)
        self._native.on_tokens = self._hear
        self._engine: RolloutEngine = self._native
        self._task: Task | None = None
        self._inbox: SimpleQueue[Callable[[], None]] = (
            SimpleQueue()
        )  # what the stepping thread is to do before its step
        self._turn = threading.Lock()  # held by the thread that steps
        self._rung = threading.Event()  # something is in the inbox
        self._loop: threading.Thread | None = None
        self._is_open, self._numbers = True, itertools.count()
        self._streams: dict[int, Pieces] = {}
        self._pending: set[Asked] = set()

    # Asking

    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, n: int = 1, max_new_tokens: int = 256, **sampling: Any
    ) -> list[list[Answer]]:
        """Answer each prompt `n` times. A prompt is a text, a list of token ids, or a list of messages. Prompts of a
        list are answered together, and the samples of one prompt share its computation.

        `sampling`: temperature (0: greedy), top_p, top_k, min_p, seed, stop (strings), stop_tokens,
        repetition_penalty, and the other fields of `tidemill.rollout.engine.Sampling`."""
        drawn = {"max_tokens": max_new_tokens, **sampling}
        asked = [self.submit(self.encode(prompt), n, drawn, place) for place, prompt in enumerate(listed(prompts))]
        return [self.collect(one) for one in asked]

    def submit(self, prompt: list[int], n: int, sampling: Mapping[str, Any], place: int = 0) -> Asked:
        """Begin to answer token ids; `collect` waits for it. Requests submitted together share their steps. The seed
        and `place` (in a list of prompts) decide the draws, and nothing else does."""
        return self._submit(prompt, n, as_sampling(sampling), place=place)

    def collect(self, asked: Asked) -> list[Answer]:
        return self._answers(self._wait(asked))

    def stream(self, prompt: Prompt, *, max_new_tokens: int = 256, **sampling: Any) -> Iterator[Piece]:
        """Answer one prompt, piece by piece. Leaving the loop early cancels the rest."""
        pieces = self._open_stream(self.encode(prompt), as_sampling({"max_tokens": max_new_tokens, **sampling}))
        try:
            while (piece := pieces.ready.get()) is not None:
                yield piece
            pieces.raise_failure()
        finally:
            self._leave_stream(pieces)

    async def agenerate(
        self, prompts: Prompt | Sequence[Prompt], *, n: int = 1, max_new_tokens: int = 256, **sampling: Any
    ) -> list[list[Answer]]:
        """`generate` for coroutines: many may wait at once, and share the engine's steps."""
        self._run_loop()
        drawn = as_sampling({"max_tokens": max_new_tokens, **sampling})
        asked = [self._submit(self.encode(prompt), n, drawn, place=i) for i, prompt in enumerate(listed(prompts))]
        return [self._answers(await asyncio.wrap_future(one)) for one in asked]

    async def astream(self, prompt: Prompt, *, max_new_tokens: int = 256, **sampling: Any) -> AsyncIterator[Piece]:
        """`stream` for coroutines."""
        loop = asyncio.get_running_loop()
        told = asyncio.Event()
        drawn = as_sampling({"max_tokens": max_new_tokens, **sampling})
        pieces = self._open_stream(self.encode(prompt), drawn, lambda: loop.call_soon_threadsafe(told.set))
        try:
            while True:
                await told.wait()
                told.clear()
                while not pieces.ready.empty():
                    if (piece := pieces.ready.get()) is None:
                        pieces.raise_failure()
                        return
                    yield piece
        finally:
            self._leave_stream(pieces)

    def encode(self, prompt: Prompt) -> list[int]:
        """Turn a prompt into token ids: messages by the chat template, text by the tokenizer, ids as they are."""
        if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
            return list(prompt)  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise ConfigError("a prompt of text needs a tokenizer", "Engine(model, tokenizer), or give token ids")
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        made = self.tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)
        return list(made["input_ids"])

    def converse(self, environment: Any, *, max_turns: int = 8) -> None:
        """Let every prompt begin a conversation with an environment (a name, or settings as in a recipe): an answer is
        then all that was said, and its `mask` tells the model's tokens from the environment's."""
        from tidemill.environment.registry import offered
        from tidemill.environment.speech import Speech
        from tidemill.recipe.config import EnvironmentSettings
        from tidemill.rollout.turns import TurnsEngine

        given = {"name": environment} if isinstance(environment, str) else dict(environment)
        settings = EnvironmentSettings.model_validate({"max_turns": max_turns, **given})
        self.tools = offered(settings)
        is_chat = bool(getattr(self.tokenizer, "chat_template", None))
        speech = Speech(self.tokenizer, is_chat, settings.role, None, self.tools)
        self._engine = TurnsEngine(self._native, settings, speech, end_tokens(self.model, self.tokenizer))
        self._task = Task()

    # Weights and memory

    def refresh(self) -> None:
        """Forget what old weights computed. Call it after the model's weights changed; running answers go on."""
        self._do(lambda: self._native.load(None, self._native.version + 1))

    def sleep(self) -> None:
        """Give the memory of keys and values back until the next request."""
        self._do(self._native.sleep)

    def close(self) -> None:
        """Cancel what runs, stop the background thread and give memory back."""
        if self._is_open:
            self._do(self._shut)
        if self._loop is not None and self._loop is not threading.current_thread():
            self._loop.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The thread that steps: the caller's while it waits, or one of our own once anything is streamed or awaited

    def _submit(
        self, prompt: list[int], n: int, sampling: Sampling, pieces: Pieces | None = None, place: int = 0
    ) -> Asked:
        number = next(self._numbers)
        asked: Asked = Future()
        self._pending.add(asked)
        asked.add_done_callback(self._pending.discard)
        done: list[Completion] = []

        def hear(completion: Completion) -> None:
            done.append(completion)
            if pieces is not None:
                pieces.end(completion)
            if len(done) < n:
                return
            failed = [c.error for c in done if c.error is not None]
            if failed:
                asked.set_exception(ModelError(f"prompt of {len(prompt)} tokens: {failed[0]}"))
            else:
                asked.set_result(sorted(done, key=lambda c: c.index))

        def submit() -> None:
            if pieces is not None:
                self._streams[number] = pieces
                pieces.number = number
            stream = number if pieces is not None else None
            request = Request(number, prompt, sampling, n, on_done=hear, task=self._task, stream=stream, draw_id=place)
            self._engine.submit(request)

        if not self._is_open:
            raise ConfigError("the engine is closed", "make a new one")
        self._post(submit)
        return asked

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.put(action)
        self._rung.set()

    def _do(self, action: Callable[[], None]) -> None:
        """Carry an action out between two steps, and wait for it."""
        done: Future[None] = Future()

        def act() -> None:
            try:
                action()
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        self._post(act)
        self._wait(done)

    def _wait(self, future: Future[T]) -> T:
        while self._loop is None and not future.done():
            with self._turn:
                if not future.done():
                    self._advance()
        return future.result()

    def _advance(self) -> None:
        """Take what is in the inbox, then one step."""
        self._rung.clear()
        while not self._inbox.empty():
            self._inbox.get()()
        if self._engine.has_work:
            is_module = isinstance(self._native.runner, PlainRunner | DenseRunner)
            # A trainer may have turned mixed precision on: the engine computes in the dtype of the weights.
            exact = torch.autocast(self._native.device.type, enabled=False)
            with exact, borrowed(self.model, self._attention) if is_module else nullcontext():
                self._engine.step()

    def _run_loop(self) -> None:
        with self._turn:
            if self._loop is None:
                self._loop = threading.Thread(target=self._serve, name="tidemill-engine", daemon=True)
                self._loop.start()

    def _serve(self) -> None:
        try:
            while self._is_open:
                with self._turn:
                    self._advance()
                if self._is_open and not self._engine.has_work:
                    self._rung.wait()
        except Exception as error:  # a step failed: nobody may wait for what will not come
            self._is_open = False
            for asked in list(self._pending):
                asked.set_exception(error)

    def _shut(self) -> None:
        self._is_open = False
        for sequence in self._engine.pause():
            if sequence.request.on_done is not None:
                cut = (sequence.tokens, sequence.logprobs, sequence.versions)
                sequence.request.on_done(Completion(sequence.request, sequence.index, *cut, finish="cancelled"))
        self._native.sleep()

    # Answers

    def _answers(self, done: list[Completion]) -> list[Answer]:
        return [
            Answer(
                self._text(c.tokens),
                list(c.tokens),
                list(c.logprobs),
                c.finish,
                list(c.request.prompt),
                c.mask,
                None if c.played is None else c.played.reward,
            )
            for c in done
        ]

    def _text(self, tokens: Sequence[int]) -> str:
        return "" if self.tokenizer is None else str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _open_stream(self, prompt: list[int], sampling: Sampling, ring: Callable[[], object] = lambda: None) -> Pieces:
        self._run_loop()
        pieces = Pieces(self._text, ring)
        self._submit(prompt, 1, sampling, pieces).add_done_callback(lambda asked: pieces.close(asked.exception()))
        return pieces

    def _hear(self, fresh: Fresh) -> None:
        for stream, token, logprob in zip(fresh.streams.tolist(), fresh.tokens.tolist(), fresh.logprobs.tolist()):
            if (pieces := self._streams.get(stream)) is not None:
                pieces.add(token, logprob)

    def _leave_stream(self, pieces: Pieces) -> None:
        def leave() -> None:
            if self._streams.pop(pieces.number, None) is not None and not pieces.is_over:
                self._engine.cancel(pieces.number)

        if self._is_open:
            self._post(leave)


def as_sampling(given: Mapping[str, Any]) -> Sampling:
    """Turn keyword arguments into a `Sampling`; `stop` is a text or a list of texts."""
    settings = dict(given)
    stop = settings.pop("stop", ())
    if stop:
        settings["stop_strings"] = (stop,) if isinstance(stop, str) else tuple(stop)
    known = {field.name for field in fields(Sampling)}
    for name in settings.keys() - known:
        raise ConfigError(
            f"generate() has no argument {name!r}", f"it has {', '.join(sorted(known))}" + did_you_mean(name, known)
        )
    return Sampling(**settings)


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt from a list of prompts: a text, token ids and messages are one."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int | Mapping)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer: those of the model's generation settings and the tokenizer's."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [] if named is None else [named] if isinstance(named, int) else list(named)
    own = getattr(tokenizer, "eos_token_id", None)
    return tuple(dict.fromkeys([*ids, *([] if own is None else [own])]))


@contextmanager
def borrowed(model: Any, kind: Any) -> Iterator[None]:
    """Inside, the model's attention is of this kind and its experts are ours; outside, both are its owner's choice."""
    config = model.config
    usual, usual_experts = attention.attention_of(model), getattr(config, "_experts_implementation", None)
    if usual == kind:
        yield
        return
    has_experts = any(experts.is_known(m) for m in model.modules())
    attention.set_attention(model, kind)
    if has_experts:
        model.set_experts_implementation(experts.NAME)
    try:
        yield
    finally:
        attention.set_attention(model, usual)
        if has_experts and usual_experts is not None:
            model.set_experts_implementation(usual_experts)


def _tried(model: Any) -> Any:
    """Refuse what the engine would compute wrongly; the attention with which it computes the others. A model whose
    layers it knows needs no trial."""
    kind = attention.ours(model.config)
    if lean.supports(model) or latent.supports(model):
        return kind
    from tidemill.models.trial import try_out

    mixers.plug(model)
    with borrowed(model, kind), at_rest(model.modules()):
        try_out(model)
        return model.config._attn_implementation if attention.is_dense(model) else kind


def _opened(where: str | Path, tokenizer: Any, device: str) -> tuple[Any, Any]:
    from tidemill import device as devices
    from tidemill.models.box import find
    from tidemill.models.load import open_folder
    from tidemill.recipe.config import ModelSettings

    folder = find.resolve(where)
    place = devices.pick(device).torch_device
    dtype = "float32" if place.type == "cpu" else "bfloat16"
    loaded = open_folder(folder, ModelSettings(path=str(folder), dtype=dtype), place)
    return loaded.model, tokenizer or loaded.tokenizer
