"""What is wrong with a request, said before it costs anything."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tidemill.rollout.engine import Request, Sampling, token_limit


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can take."""

    vocab: int
    max_len: int
    cache_tokens: int
    has_tokenizer: bool


def find_problem(request: Request, limits: Limits) -> str | None:
    """One line on the first thing that cannot work, or None."""
    how, prompt = request.sampling, np.asarray(request.prompt, np.int64)
    if request.n < 1:
        return f"n is {request.n}; a request needs at least one sample"
    if request.limits is not None and len(request.limits) != request.n:
        return f"limits has {len(request.limits)} entries for {request.n} samples"
    if not len(prompt):
        return "the prompt is empty"
    if prompt.min() < 0 or prompt.max() >= limits.vocab:
        odd = prompt.min() if prompt.min() < 0 else prompt.max()
        return f"the prompt holds token {odd}; the model knows 0 … {limits.vocab - 1}"
    if len(prompt) >= limits.max_len:
        return f"the prompt has {len(prompt)} tokens; with max_len {limits.max_len} at most {limits.max_len - 1} fit"
    most = [token_limit(request, i) for i in range(request.n)]
    if min(most) < 1:
        return f"max_tokens is {min(most)}; at least one token must be made"
    total = min(len(prompt) + max(most), limits.max_len)
    if total > limits.cache_tokens:
        return f"prompt and response may take {total} tokens; the cache has room for {limits.cache_tokens}"
    return _problem_of_numbers(how) or _problem_of_tokens(how, limits)


def _problem_of_numbers(how: Sampling) -> str | None:
    if how.temperature < 0 or not np.isfinite(how.temperature):
        return f"temperature is {how.temperature}; it must be 0 (greedy) or more"
    if not 0 < how.top_p <= 1 or how.top_k < 0 or not 0 <= how.min_p <= 1:
        got = f"top_p {how.top_p}, top_k {how.top_k}, min_p {how.min_p}"
        return f"{got}: top_p is in (0, 1], top_k at least 0, min_p in [0, 1]"
    if how.repetition_penalty <= 0:
        return f"repetition_penalty is {how.repetition_penalty}; it must be above 0 (1: off)"
    return None


def _problem_of_tokens(how: Sampling, limits: Limits) -> str | None:
    named = {
        "stop_tokens": how.stop_tokens,
        "logit_bias": tuple(how.logit_bias or ()),
        "allowed_tokens": how.allowed_tokens or (),
    }
    for name, tokens in named.items():
        for token in tokens:
            if not 0 <= token < limits.vocab:
                return f"{name} holds token {token}; the model knows 0 … {limits.vocab - 1}"
    if how.allowed_tokens is not None and not how.allowed_tokens:
        return "allowed_tokens is empty: nothing could be drawn"
    if how.stop_strings and not limits.has_tokenizer:
        return "stop_strings need a tokenizer, and the engine was made without one"
    if any(not stop for stop in how.stop_strings):
        return "stop_strings holds an empty string"
    return None
