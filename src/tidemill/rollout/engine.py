"""The rollout interface: requests in, completions out, whichever engine makes the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from tidemill.batch import Array
from tidemill.environment.api import Played, Task
from tidemill.errors import ModelError, did_you_mean
from tidemill.tiles import Tiles

Finish = Literal["stop", "length", "error", "cancelled"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a response must be: JSON of a schema, what a regular expression matches, or a grammar in Lark's form."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Log-probabilities are those of the distribution at `temperature`."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    max_tokens: int = 256
    stop_tokens: tuple[int, ...] = ()  # beside the model's own end tokens
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_tokens: tuple[int, ...] | None = None
    grammar: Grammar | None = None
    top_logprobs: int = 0  # of each token, so many of the likeliest ones are given too


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, `n` samples of it. Sample k draws with a stream made of (sampling.seed, id, k) alone, so the same
    request gives the same tokens whatever shares the batch."""

    id: int
    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    limits: Sequence[int] | None = None  # most tokens of each sample, where they differ; else sampling.max_tokens
    on_done: Callable[[Completion], None] | None = None
    task: Task | None = None  # what the environment plays with each sample; None: one turn
    tiles: Tiles = ()  # of the images that the prompt shows
    strays: int = 0  # places for images in the prompt that a model wrote there: words like any other
    draw_id: int | None = None  # in place of the id in the random stream: requests may share one, ids may not
    stream: int | None = None  # number under which `on_tokens` hears of sample 0 as it is made; of sample k: plus k
    user: Any = None

    @property
    def draws_as(self) -> int:
        return self.id if self.draw_id is None else self.draw_id


Top = list[tuple[int, float]]  # tokens and their log-probabilities, likeliest first


@dataclass(frozen=True, slots=True)
class Fresh:
    """Tokens that one step made, of samples that are streamed."""

    streams: Array  # int64
    tokens: Array
    logprobs: Array
    kept: Array | None  # as in `Completion`


OnTokens = Callable[[Fresh], None]


@dataclass(slots=True)
class Completion:
    """One finished sample of a request."""

    request: Request
    index: int  # which of the request's n
    tokens: list[int]  # the response, its end token included when it stopped by one
    logprobs: list[float]
    versions: list[int]  # weight version that made each token
    finish: Finish
    error: str | None = None
    kept: list[float] | None = None  # log of the probability mass kept by top-p / top-k / min-p, per token; None: all
    routes: Array | None = None  # (inputs · layers · k) experts that each token but the last went through
    mask: list[int] | None = None  # 0 where an environment made the token; None: the model made all
    played: Played | None = None  # what the conversation with an environment came to
    tiles: Tiles = ()  # of images that an environment showed, by their places in prompt and response
    is_told: bool = False  # `on_done` has been called
    starts: list[int] | None = None  # where further trajectories of the sample begin, in prompt and tokens together
    turn_rewards: list[tuple[int, float]] | None = None  # in their order: where a turn begins in `tokens`, its reward
    seat: int = 0  # of a game of several players
    tops: list[Top] | None = None  # of each token the likeliest ones, where they were asked for


@dataclass(slots=True)
class Partial:
    """An unfinished sample: what was made so far, to go on later."""

    request: Request
    index: int
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    kept: list[float] | None = None
    cache: Any = None  # what the engine kept of its keys and values, where it was asked to


def token_limit(request: Request, index: int) -> int:
    """How many tokens sample `index` may have."""
    return request.sampling.max_tokens if request.limits is None else request.limits[index]


def run_callbacks(done: list[Completion], held: list[Completion]) -> list[Completion]:
    """What an engine gives, once those who wait for a request have heard of it. Where one of them raises, the others
    hear all the same, and what this step could not give goes to `held`, for the next one."""
    failure: Exception | None = None
    for completion in done:
        if completion.request.on_done is None or completion.is_told:
            continue
        completion.is_told = True
        try:
            completion.request.on_done(completion)
        except Exception as error:
            failure = failure or error
    if failure is not None:
        held += done
        raise failure
    return done


def load_part(model: Any, weights: Any) -> None:
    """Copy some or all weights into a model's own. A name that it does not have is refused: it would change nothing,
    and the engine would go on under a new version with old weights."""
    given = dict(weights)
    unknown = sorted(given.keys() - model.state_dict().keys())
    if unknown:
        raise ModelError(
            f"{type(model).__name__} has no weight {unknown[0]!r} (of {len(given)} names {len(unknown)} are unknown)"
            + did_you_mean(unknown[0], model.state_dict()),
            "give weights by the names of the model's state_dict",
        )
    model.load_state_dict(given, strict=False)


@runtime_checkable
class Streams(Protocol):
    """An engine that tells tokens as it makes them. Others give a sample when it is whole."""

    on_tokens: OnTokens | None


@runtime_checkable
class CountsCache(Protocol):
    """An engine that counts what became of its cache."""

    def cache_counts(self) -> dict[str, int]:
        """By the names of metrics, since it was made."""


def cache_counts(engine: Any) -> dict[str, int]:
    return engine.cache_counts() if isinstance(engine, CountsCache) else {}


class RolloutEngine(Protocol):
    @property
    def version(self) -> int:
        """Of the weights now serving."""

    def submit(self, request: Request) -> None: ...

    def step(self) -> list[Completion]:
        """Advance every running sequence by at least one token; give what finished."""

    @property
    def has_work(self) -> bool: ...

    def pause(self) -> list[Partial]: ...

    def resume(self, partials: Sequence[Partial]) -> None: ...

    def cancel(self, request_id: int) -> None: ...

    def load(self, weights: Any, version: int) -> None:
        """Serve new weights. In one process with one layout the tensors are shared and only the version changes."""

    def sleep(self) -> None: ...

    def wake(self) -> None: ...
