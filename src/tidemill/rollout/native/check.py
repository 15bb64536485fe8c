"""What is wrong with a request, said before it costs anything."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from tidemill.models.vision.eyes.eyes import Eyes
from tidemill.models.vision.views.view import misplaced
from tidemill.rollout.engine import Completion, Request, Sampling

# Beyond these, numbers that float32 logits are divided by or added to could leave its range.
COLDEST, HOTTEST = 1e-6, 1e6
FARTHEST = 1e6
PENALTIES = (1e-3, 1e3)
MOST_SAMPLES = 1 << 20
MOST_TOPS = 20


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What an engine can take."""

    vocab: int
    max_len: int
    cache_tokens: int
    has_tokenizer: bool
    eyes: Eyes | None = None


def find_problem(request: Request, limits: RequestLimits) -> str | None:
    """One line on the first thing that cannot work, or None."""
    how = request.sampling
    return (
        _problem_of_counts(request)
        or _problem_of_prompt(request, limits)
        or _problem_of_tiles(request, limits)
        or _problem_of_numbers(how)
        or _problem_of_tokens(how, limits)
        or _problem_of_strings(how, limits)
    )


def refused(request: Request, problem: str) -> list[Completion]:
    """What a request with a problem comes to: an error for each of its samples."""
    count = request.n if _is_count(request.n) and 1 <= request.n <= MOST_SAMPLES else 1
    return [Completion(request, index, [], [], [], "error", problem) for index in range(count)]


def _problem_of_counts(request: Request) -> str | None:
    n, how = request.n, request.sampling
    whole = {"id": request.id, "n": n, "max_tokens": how.max_tokens, "seed": how.seed, "top_k": how.top_k}
    for name, value in whole.items():
        if not _is_count(value):
            return f"{name} is {value!r:.40}; it must be a whole number"
    if n < 1:
        return f"n is {n}; a request needs at least one sample"
    if n > MOST_SAMPLES:
        return f"n is {n}; a request has at most {MOST_SAMPLES} samples"
    if request.limits is not None and not isinstance(request.limits, Collection):
        return f"limits is {request.limits!r:.40}; it must be a list of whole numbers"
    most = [how.max_tokens] if request.limits is None else list(request.limits)
    if request.limits is not None and len(most) != n:
        return f"limits has {len(most)} entries for {n} samples"
    for value in most:
        if not _is_count(value) or value < 1:
            name = "max_tokens" if request.limits is None else "one of limits"
            return f"{name} is {value!r:.40}; at least one token must be made"
    return None


def _problem_of_prompt(request: Request, limits: RequestLimits) -> str | None:
    try:
        prompt = np.asarray(request.prompt)
    except (TypeError, ValueError):  # lists of unequal lengths
        prompt = np.zeros((0, 0))
    if prompt.ndim == 1 and not len(prompt):
        return "the prompt is empty"
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
        return f"the prompt must be a flat list of token numbers; it is {request.prompt!r:.60}"
    if request.tiles and limits.eyes is not None:  # its place may lie beyond the words
        prompt = prompt[prompt != limits.eyes.view.token]
    if len(prompt) and (prompt.min() < 0 or prompt.max() >= limits.vocab):
        odd = prompt.min() if prompt.min() < 0 else prompt.max()
        return f"the prompt holds token {odd}; the model knows 0 … {limits.vocab - 1}"
    if len(prompt) >= limits.max_len:
        return f"the prompt has {len(prompt)} tokens; with max_len {limits.max_len} at most {limits.max_len - 1} fit"
    most = request.sampling.max_tokens if request.limits is None else max(request.limits)
    total = min(len(prompt) + most, limits.max_len)
    if total > limits.cache_tokens:
        return f"prompt and response may take {total} tokens; the cache has room for {limits.cache_tokens}"
    return None


def _problem_of_tiles(request: Request, limits: RequestLimits) -> str | None:
    if limits.eyes is None:
        return f"the prompt shows {len(request.tiles)} images; the model reads text alone" if request.tiles else None
    return misplaced(request.prompt, request.tiles, limits.eyes.view, request.strays)


def _problem_of_numbers(how: Sampling) -> str | None:
    names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    for name in names:
        if not _is_number(getattr(how, name)):
            return f"{name} is {getattr(how, name)!r:.40}; it must be a finite number"
    if how.temperature != 0 and not COLDEST <= how.temperature <= HOTTEST:
        return f"temperature is {how.temperature}; it must be 0 (greedy) or in [{COLDEST:g}, {HOTTEST:g}]"
    if not 0 < how.top_p <= 1 or how.top_k < 0 or not 0 <= how.min_p <= 1:
        got = f"top_p {how.top_p}, top_k {how.top_k}, min_p {how.min_p}"
        return f"{got}: top_p is in (0, 1], top_k at least 0, min_p in [0, 1]"
    low, high = PENALTIES
    if not low <= how.repetition_penalty <= high:
        return f"repetition_penalty is {how.repetition_penalty}; it must be in [{low:g}, {high:g}] (1: off)"
    for name in ("presence_penalty", "frequency_penalty"):
        if abs(getattr(how, name)) > FARTHEST:
            return f"{name} is {getattr(how, name)}; it must be in [{-FARTHEST:g}, {FARTHEST:g}]"
    if not _is_count(how.top_logprobs) or not 0 <= how.top_logprobs <= MOST_TOPS:
        return f"top_logprobs is {how.top_logprobs!r:.40}; it must be a whole number from 0 to {MOST_TOPS}"
    return None


def _problem_of_tokens(how: Sampling, limits: RequestLimits) -> str | None:
    if how.logit_bias is not None and not isinstance(how.logit_bias, Mapping):
        return f"logit_bias is {how.logit_bias!r:.40}; it maps tokens to numbers"
    named = {
        "stop_tokens": how.stop_tokens,
        "logit_bias": tuple(how.logit_bias or ()),
        "allowed_tokens": () if how.allowed_tokens is None else how.allowed_tokens,
    }
    for name, tokens in named.items():
        if not isinstance(tokens, Collection):  # what can be gone through only once is no list either
            return f"{name} is {tokens!r:.40}; it must be a list of token numbers"
        for token in tokens:
            if not _is_count(token) or not 0 <= token < limits.vocab:
                return f"{name} holds token {token!r:.40}; the model knows 0 … {limits.vocab - 1}"
    for token, bias in (how.logit_bias or {}).items():
        if not _is_number(bias) or abs(bias) > FARTHEST:
            return (
                f"logit_bias of token {token} is {bias!r:.40}; it must be in [{-FARTHEST:g}, {FARTHEST:g}] (to forbid "
                "tokens altogether, name the others in allowed_tokens)"
            )
    if how.allowed_tokens is not None and not len(how.allowed_tokens):
        return "allowed_tokens is empty: nothing could be drawn"
    return None


def _problem_of_strings(how: Sampling, limits: RequestLimits) -> str | None:
    if isinstance(how.stop_strings, str) or not isinstance(how.stop_strings, Collection):
        return f"stop_strings is {how.stop_strings!r:.40}; it must be a list of strings"
    if how.stop_strings and not limits.has_tokenizer:
        return "stop_strings need a tokenizer, and the engine was made without one"
    if how.grammar is not None and not limits.has_tokenizer:
        return "a grammar needs a tokenizer, and the engine was made without one"
    for stop in how.stop_strings:
        if not isinstance(stop, str) or not stop:
            return "stop_strings holds an empty string" if stop == "" else f"stop_strings holds {stop!r:.40}"
        if any("\ud800" <= character <= "\udfff" for character in stop):
            return f"stop_strings holds {stop!r:.40}; half a character is in no text"
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral)


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False
