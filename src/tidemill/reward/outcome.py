"""One function's judgement of one sample: a value, or what went wrong. The same code runs in threads and in workers."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidemill.reward.api import Reward, RewardFunction, Sample


@dataclass(frozen=True, slots=True)
class Outcome:
    """`fault` is empty, or one of raised, not_finite, wrong_type, timed_out, died; `why` says it in words."""

    value: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    correct: bool | None = None
    fault: str = ""
    why: str = ""


def judge(function: RewardFunction, sample: Sample, args: Mapping[str, Any]) -> Outcome:
    try:
        result = function(sample, **args)
    except Exception as error:
        return Outcome(fault="raised", why=f"raised {type(error).__name__}: {error}{at(error)}"[:2000])
    return as_outcome(result)


def judge_many(function: Callable[..., Any], samples: Sequence[Sample], args: Mapping[str, Any]) -> list[Outcome]:
    """Of a batched function; what it raises befalls all of them."""
    if not samples:
        return []
    try:
        results = list(function(samples, **args))
    except Exception as error:
        return [Outcome(fault="raised", why=f"raised {type(error).__name__}: {error}{at(error)}"[:2000])] * len(samples)
    if len(results) != len(samples):
        why = f"returned {len(results)} rewards for {len(samples)} samples"
        return [Outcome(fault="wrong_type", why=why)] * len(samples)
    return [as_outcome(result) for result in results]


def as_outcome(result: Any) -> Outcome:
    reward = result if isinstance(result, Reward) else None
    try:
        value = float(result if reward is None else reward.value)
        parts = {} if reward is None else {str(k): float(v) for k, v in reward.parts.items()}
    except (TypeError, ValueError):
        return Outcome(fault="wrong_type", why=f"returned {result!r:.80}, not a number or a Reward")
    if not all(map(math.isfinite, (value, *parts.values()))):
        return Outcome(fault="not_finite", why=f"returned {value if not math.isfinite(value) else parts}")
    return Outcome(value, parts, None if reward is None else reward.correct)


def at(error: Exception) -> str:
    """Where in the user's code it happened: the innermost line outside this file."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
