"""One function's judgement of one sample: a value, or what went wrong. The same code runs in threads and in workers."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidemill.reward.api import Reward, RewardFunction, Sample

LARGEST = 1e9


@dataclass(frozen=True, slots=True)
class Outcome:
    """`fault` is empty, or raised, not_finite, too_large, wrong_type, timed_out or died; `why` says it in words."""

    value: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    correct: bool | None = None
    fault: str = ""
    why: str = ""
    at: str = ""  # file:line of the function that raised


def judge(function: RewardFunction, sample: Sample, args: Mapping[str, Any]) -> Outcome:
    try:
        result = function(sample, **args)
    except Exception as error:
        return raised(error, function)
    return as_outcome(result)


def judge_many(function: Callable[..., Any], samples: Sequence[Sample], args: Mapping[str, Any]) -> list[Outcome]:
    """Judge samples with a batched function; an exception fails all of them."""
    if not samples:
        return []
    try:
        results = list(function(samples, **args))
    except Exception as error:
        return [raised(error, function)] * len(samples)
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
    if abs(value) > LARGEST:
        why = f"returned {value:g}: rewards are at most {LARGEST:g}, because advantages square them in float32"
        return Outcome(fault="too_large", why=why)
    return Outcome(value, parts, None if reward is None else reward.correct)


def raised(error: Exception, function: Callable[..., Any]) -> Outcome:
    """Report what a function raised, with the line of its own file, or else the innermost line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    own = getattr(getattr(function, "__code__", None), "co_filename", None)
    at = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1] if frames else None)
    where = f"{at.filename}:{at.lineno}" if at else ""
    why = f"raised {type(error).__name__}: {error}"[:1800] + (f" ({where})" if where else "")
    return Outcome(fault="raised", why=why, at=where)
