"""Games of the package gem (GEM, `gem-llm`): what the model says is the action, what it reads is the game's own text.

GEM draws from Python's and numpy's common generators, so each game keeps a state of them of its own: other games, and
the run itself, neither hear of it nor change it.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tidemill.data.generators import Generator, Problem
from tidemill.environment.api import Maker, Task, Turn
from tidemill.errors import ConfigError, MissingExtra

_common = threading.RLock()  # whoever holds it may change the common generators


class Chance:
    """A state of the common generators that one game has to itself."""

    def __init__(self, seed: int) -> None:
        self._state: tuple[Any, Any] | None = None
        with self.used():
            random.seed(seed)
            np.random.seed(seed % (1 << 32))

    @contextmanager
    def used(self) -> Iterator[None]:
        with _common:
            kept = random.getstate(), np.random.get_state()
            if self._state is not None:
                self._set(*self._state)
            try:
                yield
            finally:
                self._state = random.getstate(), np.random.get_state()
                self._set(*kept)

    @staticmethod
    def _set(own: Any, numbers: Any) -> None:
        random.setstate(own)
        np.random.set_state(numbers)


class GemGame:
    """Rewards are the game's own. A game that is cut off by its limit of turns is over."""

    def __init__(self, task: Task, game: str, **args: Any) -> None:
        self.seed = int(task.meta.get("seed", task.seed)) % (1 << 31)
        self.chance = Chance(self.seed)
        with self.chance.used():
            try:
                self.game = package().make(game, **args)
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"environment gem:{game}: {error}") from error

    def reset(self) -> str:
        with self.chance.used():
            text, told = self.game.reset(seed=self.seed)
        return _joined(text, told)

    def step(self, text: str) -> Turn:
        with self.chance.used():
            seen, reward, is_over, is_cut, told = self.game.step(text)
        return Turn(_joined(seen, told), is_done=bool(is_over or is_cut), reward=float(reward))


def _joined(text: Any, told: Any) -> str:
    """What the game shows, with the question that it ends in."""
    question = told.get("suffix", "") if isinstance(told, dict) else ""
    return f"{str(text).rstrip()}\n{question}".rstrip() + "\n"


def package() -> Any:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        import gem
    except ImportError:
        raise MissingExtra("environment.name: gem:…", "gem-llm", "games") from None
    root.setLevel(level)  # it sets up logging for everybody
    root.handlers[:] = handlers
    return gem


def maker(game: str) -> Maker:
    package()
    return lambda task, **args: GemGame(task, game, **args)


def generator(game: str) -> Generator:
    """Openings of the game, one per seed; `data.args` are the environment's own."""

    def make(rng: random.Random, **args: Any) -> Problem:
        seed = rng.randrange(1 << 31)
        opening = GemGame(Task(seed=seed), game, **args).reset()
        return Problem(opening, "", None, {"seed": seed}, key=f"{game} {seed}")

    return make
