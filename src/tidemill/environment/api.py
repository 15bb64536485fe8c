"""What an environment gets and gives: the model speaks, the environment answers, until one of them is done.

An environment is a class: made of a task (and the recipe's arguments), then `reset()` once, and `step(text)` for what
the model says. It knows nothing of tokens; `rollout/turns.py` keeps those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tidemill.chat.answer import Answer, Schema


@dataclass(frozen=True, slots=True)
class Task:
    """What one conversation is about: its data row, and what the engine adds to it."""

    answer: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)  # the row's other columns
    where: str = ""
    prompt: str = ""  # as the model reads it, special tokens left out
    seed: int = 0  # the same for all samples of one prompt
    is_trial: bool = False  # of an evaluation


@dataclass(frozen=True, slots=True)
class Turn:
    """The environment's answer to one thing the model said. Rewards and parts of all turns are added up."""

    text: str = ""  # what the model reads next; not used when done
    is_done: bool = False
    reward: float = 0.0
    is_inline: bool = False  # the text goes on in the model's own turn (a tool's result), not as a message of its own
    is_solved: bool | None = None  # whether the sample counts as correct; None: decided by its reward
    parts: Mapping[str, float] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()  # for a chat model, in place of the text: messages of any role
    images: Sequence[Any] = ()  # that the text shows where it says <image>, or first: arrays, PIL images, paths


class Environment(Protocol):
    def reset(self) -> str:
        """Begin. What the model reads first, a game's opening: the prompt of rows that the environment makes."""

    def step(self, text: str) -> Turn: ...


@runtime_checkable
class Closes(Protocol):
    """An environment that holds something to give back."""

    def close(self) -> None: ...


@runtime_checkable
class Interrupts(Protocol):
    """An environment that wants the model to stop at some strings, such as the end of a tool call."""

    stop: tuple[str, ...]


@runtime_checkable
class UsesTools(Protocol):
    """An environment whose tools a chat model calls in the form that its template has for them."""

    schemas: Sequence[
        Schema
    ]  # what the prompt tells the model of them; empty: calls are plain text, as `step` reads it

    def use(self, said: Answer) -> Turn:
        """In place of `step`, for a chat model: what it said, and what it called."""


@dataclass(frozen=True, slots=True)
class Round:
    """Where a game of several players stands. Rewards and parts of all rounds are added up."""

    asks: Mapping[int, str] = field(default_factory=dict)  # who speaks next, by seat, and what each reads first
    is_done: bool = False
    rewards: Mapping[int, float] = field(default_factory=dict)  # by seat
    solved: Mapping[int, bool] = field(default_factory=dict)  # by seat, whether its sample counts as correct
    parts: Mapping[str, float] = field(default_factory=dict)


class Game(Protocol):
    """An environment for several players. A class says so by its attribute `seats`, or by `seats_for(**args)`."""

    seats: int

    def reset(self) -> Round: ...

    def step(self, said: Mapping[int, str]) -> Round:
        """What everyone said who was asked."""


@runtime_checkable
class HasExpert(Protocol):
    """A game that knows how to be played."""

    def expert(self, seat: int) -> str:
        """What a perfect player would say now, on this seat."""


def last_said(mask: Sequence[int]) -> int:
    """Where the model began to speak for the last time: the start of the last run of ones."""
    made = np.flatnonzero(np.asarray(mask))
    if len(made) == 0:
        return len(mask)
    breaks = np.flatnonzero(np.diff(made) > 1)
    return int(made[breaks[-1] + 1] if len(breaks) else made[0])


Maker = Callable[..., Environment]  # (task, **args)
GameMaker = Callable[..., Game]


@dataclass(frozen=True, slots=True)
class Played:
    """What a finished conversation came to; the column `played` holds it as JSON."""

    reward: float = 0.0
    turns: int = 0
    is_solved: bool | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None  # the environment failed, in words

    def after(self, turn: Turn) -> Played:
        parts = dict(self.parts)
        for name, value in turn.parts.items():
            parts[name] = parts.get(name, 0.0) + float(value)
        solved = self.is_solved if turn.is_solved is None else turn.is_solved
        return Played(self.reward + float(turn.reward), self.turns + 1, solved, parts, self.error)

    def plain(self) -> dict[str, Any]:
        return {**{n: getattr(self, n) for n in self.__slots__}, "parts": dict(self.parts)}
