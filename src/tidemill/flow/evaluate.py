"""Evaluation on held-out problems: greedy accuracy, and pass@1 and pass@k of sampled answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import comb
from typing import Any

from tidemill.data.prompts import PromptTokens
from tidemill.data.source import Example, Source
from tidemill.environment.api import Task, last_said
from tidemill.errors import DataError
from tidemill.flow.records import Activity, Answered, Evaluation
from tidemill.flow.stages.rolling import sampling_of
from tidemill.recipe.config import Config
from tidemill.reward.api import FROM, Sample
from tidemill.reward.score import Failures, Scorer
from tidemill.rollout.engine import Completion, Request, RolloutEngine, Sampling
from tidemill.tiles import Tiles, images

# Far above any training group's id, so that an evaluation never draws a training request's random stream.
FIRST_ID = 1 << 48
Tell = Callable[[Activity], None]
TELL_S = 0.2  # between reports while answers are judged
PIECE = 64  # answers judged at once, so that progress shows between calls of a batched function


def evaluate(
    engine: RolloutEngine,
    source: Source,
    encode: PromptTokens,
    decode: Callable[[list[int]], str],
    scorer: Scorer,
    config: Config,
    *,
    size: int,
    samples: int,
    tell: Tell = lambda activity: None,
) -> Evaluation:
    """Evaluate. `tell` receives the progress after every step of the engine, and may raise to end it."""
    problems = held_out(source, encode, size)
    base = sampling_of(config, config.seed)
    is_sampled = samples > 1 or (config.eval.temperature > 0 and samples > 0)
    greedy = Sampling(temperature=0.0, max_tokens=base.max_tokens, stop_strings=base.stop_strings)
    own = config.environment
    tasks = [None if own is None else Task(e.answer, e.meta, e.where, is_trial=True) for e, *_ in problems]
    shown = [encode.shown(example) for example, *_ in problems]
    whole = len(problems) * (1 + (samples if is_sampled else 0))
    before = scorer.failures
    answers = _answer(engine, problems, tasks, greedy, 1, decode, scorer, Progress(tell, 0, whole))
    first = [replace(a[0], prompt=text) for a, text in zip(answers, shown)]
    pass_at: dict[int, float] = {}
    if is_sampled:
        drawn = replace(base, temperature=config.eval.temperature)
        answers = _answer(engine, problems, tasks, drawn, samples, decode, scorer, Progress(tell, len(problems), whole))
        counts = [sum(a.correct for a in each) for each in answers]
        pass_at = {k: sum(pass_at_k(samples, c, k) for c in counts) / len(counts) for k in powers_up_to(samples)}
    return Evaluation(
        accuracy=sum(a.correct for a in first) / len(first),
        pass_at=pass_at,
        reward=sum(a.reward for a in first) / len(first),
        response_tokens=sum(a.tokens for a in first) / len(first),
        answers=tuple(first),
        scored=scorer.failures.scored - before.scored,
        failed=scorer.failures.failed - before.failed,
        first_failure=_first_failure(scorer, before),
    )


def _first_failure(scorer: Scorer, before: Failures) -> str:
    """Return the first failure among these answers; empty where an earlier one was reported already."""
    found = scorer.failures.first
    return "" if found is None or before.failed else found.message


def play(engine: Any, size: int, tell: Tell = lambda activity: None) -> Evaluation:
    """Evaluate a network: episodes with its likeliest actions."""
    found = engine.evaluated(size, lambda done: tell(Activity("evaluating", done, max(done, size))))
    answers = tuple(Answered(*one) for one in found.pop("answers"))
    return Evaluation(**found, answers=answers, scored=len(answers))


@dataclass(frozen=True, slots=True)
class Progress:
    """An evaluation's progress: `done` answers of `total` were made before this part of it."""

    tell: Tell
    done: int
    total: int


@contextmanager
def averaged(learner: Any, engine: RolloutEngine) -> Iterator[None]:
    """Within the context, the engine serves the running mean of the learner's weights, where one is kept. Cached
    prefixes of one are invalid for the other, and an engine with its own copy must be given each."""
    if learner is None or not learner.config.learn.ema:
        yield
        return
    try:
        with learner.averaged():
            engine.load(None, engine.version)
            yield
    finally:
        engine.load(None, engine.version)


Asked = tuple[Example, list[int], Tiles]  # a problem, its tokens, and what these show


def held_out(source: Source, encode: PromptTokens, size: int) -> list[Asked]:
    """Return the first `size` usable held-out problems, always the same ones."""
    problems: list[Asked] = []
    last_error = ""
    for index in range(size if source.size is None else min(size, source.size)):
        example = source.example(index)
        try:
            tokens = encode.encode(example)
            problems.append((example, tokens, encode.tiles(example, tokens)))
        except DataError as error:
            last_error = error.message
    if not problems:
        raise DataError(f"{source.name}: no held-out problem can be used", last_error or "set data.held_out above 0")
    return problems


def _answer(
    engine: RolloutEngine,
    problems: Sequence[Asked],
    tasks: Sequence[Task | None],
    sampling: Sampling,
    n: int,
    decode: Callable[[list[int]], str],
    scorer: Scorer,
    progress: Progress,
) -> list[list[Answered]]:
    for i, (_, prompt, tiles) in enumerate(problems):
        engine.submit(Request(FIRST_ID + i, prompt, sampling, n=n, task=tasks[i], tiles=tiles))
    done: dict[tuple[int, int], Completion] = {}
    try:
        while engine.has_work:
            for completion in engine.step():
                done[completion.request.id - FIRST_ID, completion.index] = completion
            progress.tell(Activity("evaluating", progress.done + len(done), progress.total))
    except BaseException:  # stopped: cancel what the engine has left
        for i in range(len(problems)):
            engine.cancel(FIRST_ID + i)
        raise
    samples = [_sample(problems[i], done[i, k], i * n + k, decode) for i in range(len(problems)) for k in range(n)]
    pieces = [scorer.submit(samples[at : at + PIECE]) for at in range(0, len(samples), PIECE)]
    waiting = set(pieces)
    while waiting:  # rewards may take long: report, and let the user stop
        judged = len(samples) - PIECE * len(waiting)
        progress.tell(Activity("scoring answers", max(0, judged), len(samples)))
        waiting = wait(waiting, TELL_S, FIRST_COMPLETED).not_done
    scored = [one for piece in pieces for one in piece.result()]
    made = [len(done[i, k].tokens) for i in range(len(problems)) for k in range(n)]
    flat = [
        Answered(s.prompt, s.answer, s.transcript, r.correct, r.value, tokens, str(s.meta.get(FROM, "")), dict(r.parts))
        for s, r, tokens in zip(samples, scored, made)
    ]
    return [flat[i * n : (i + 1) * n] for i in range(len(problems))]


def _sample(problem: Asked, made: Completion, id: int, decode: Callable[[list[int]], str]) -> Sample:
    example, prompt, tiles = problem
    return Sample(
        prompt=decode(prompt),
        response=decode(made.tokens if made.mask is None else made.tokens[last_said(made.mask) :]),
        transcript=decode(made.tokens),
        tokens=[*prompt, *made.tokens],
        images=images(tiles),
        played={} if made.played is None else made.played.plain(),
        answer=example.answer,
        meta=example.meta,
        id=id,
        where=example.where,
        finish=made.finish,
    )


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Compute the chance that k of n samples hold a correct one (Chen et al. 2021, equation 1)."""
    return 1.0 if n - correct < k else 1.0 - comb(n - correct, k) / comb(n, k)


def powers_up_to(n: int) -> list[int]:
    return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})


def revealer(tokenizer: Any) -> Callable[[list[int]], str]:
    """Decode token ids for people: special tokens are visible."""
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=False))


def decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """Decode token ids for rewards: without end tokens and other special ones."""
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)
