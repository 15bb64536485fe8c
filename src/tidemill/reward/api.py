"""What a reward function gets and gives: `def reward(sample: Sample, **args) -> float | bool | Reward`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FROM = "from_source"  # in a sample's meta: which of several sources it came from


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to judge."""

    prompt: str
    response: str
    answer: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)  # the data row's other columns
    id: int = 0
    where: str = ""  # the data row's origin, for messages
    finish: str = "stop"  # why the response ended: stop, length, error, cancelled
    transcript: str = ""  # all turns of a conversation, answers included; without an environment the response
    tokens: Sequence[int] = ()  # prompt and response as they were sampled; only where the reward runs in this process
    images: Sequence[Any] = ()  # of the prompt, uint8 (height, width, 3); as tokens, and only with rewards.images
    played: Mapping[str, Any] = field(default_factory=dict)  # what the environment made of it: reward, turns, parts, …

    @property
    def called(self) -> str:
        return f"sample {self.id} ({self.where})" if self.where else f"sample {self.id}"


@dataclass(frozen=True, slots=True)
class Reward:
    """A value, its components (logged on their own) and whether the response counts as correct."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    correct: bool | None = None  # None: decided by rewards.correct_above


@dataclass(frozen=True, slots=True)
class Scored:
    """What the recipe's reward functions made of one sample. `error`: the first that failed, in words."""

    value: float
    parts: Mapping[str, float]
    correct: bool
    error: str | None = None


RewardFunction = Callable[..., "float | bool | Reward"]


def batched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a reward that takes a list of samples and gives a list of rewards. It runs in this process, in a thread."""
    function.is_batched = True  # type: ignore[attr-defined]
    return function


def is_batched(function: Callable[..., Any]) -> bool:
    return bool(getattr(function, "is_batched", False))


def reads(*columns: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declares the row's columns that a reward cannot do without, so that rows lacking them are refused at the start.
    `reads("tests|answer")`: one of the two is enough."""

    def declared(function: Callable[..., Any]) -> Callable[..., Any]:
        function.reads = columns  # type: ignore[attr-defined]
        return function

    return declared
