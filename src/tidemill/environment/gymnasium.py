"""Games of the package gymnasium whose moves can be counted: the model names one, by number or by a given name."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from tidemill.data.generators import Generator, Problem
from tidemill.environment.api import Maker, Task, Turn
from tidemill.errors import ConfigError, MissingExtra

COLOURS = re.compile(r"\x1b\[(\d+)m")
HIGHLIGHT = re.compile(r"\x1b\[4[0-7]m(.)\x1b\[0m")  # a coloured cell: where the player stands


class TextGame:
    """What the model reads is the game's own text (render mode ansi) where it has one, else the observation itself.

    `actions` names the moves in their order. A move that is none ends the game. `discount` is taken per move.
    """

    def __init__(self, task: Task, game: str, actions: Sequence[str] = (), discount: float = 0.0, **args: Any) -> None:
        gymnasium = package()
        has_text = _has_text(gymnasium, game)
        self.game = gymnasium.make(game, **({"render_mode": "ansi"} if has_text else {}), **args)
        if not hasattr(self.game.action_space, "n"):
            raise ConfigError(
                f"environment gymnasium:{game} has moves that cannot be counted: {self.game.action_space}"
            )
        self.actions, self.discount, self.has_text = list(actions), discount, has_text
        self.first = int(getattr(self.game.action_space, "start", 0))
        self.seed = int(task.meta.get("seed", task.seed)) % (1 << 31)

    def reset(self) -> str:
        observation, _ = self.game.reset(seed=self.seed)
        return self._text(observation)

    def step(self, text: str) -> Turn:
        move = self._move(text)
        if move is None:
            return Turn(is_done=True, parts={"broken_rules": 1.0})
        observation, reward, is_over, is_cut, _ = self.game.step(move)
        gained = float(reward) - self.discount
        return Turn(self._text(observation), is_done=bool(is_over or is_cut), reward=gained)

    def close(self) -> None:
        self.game.close()

    def _move(self, text: str) -> int | None:
        """The last move named."""
        if self.actions:
            named = [(text.rfind(name), i) for i, name in enumerate(self.actions) if name in text]
            return self.first + max(named)[1] if named else None
        numbers = [int(n) for n in re.findall(r"\d{1,6}", text)]
        legal = numbers and self.first <= numbers[-1] < self.first + int(self.game.action_space.n)
        return numbers[-1] if legal else None

    def _text(self, observation: Any) -> str:
        if not self.has_text:
            return f"{observation}\n"
        return COLOURS.sub("", HIGHLIGHT.sub(r"[\1]", str(self.game.render())))


def _has_text(gymnasium: Any, game: str) -> bool:
    try:
        probe = gymnasium.make(game)
    except gymnasium.error.Error as error:
        raise ConfigError(f"environment gymnasium:{game}: {error}") from error
    modes = probe.metadata.get("render_modes", [])
    probe.close()
    return "ansi" in modes


def package() -> Any:
    try:
        import gymnasium
    except ImportError:
        raise MissingExtra("environment.name: gymnasium:…", "gymnasium", "games") from None
    return gymnasium


def maker(game: str) -> Maker:
    package()
    return lambda task, **args: TextGame(task, game, **args)


def generator(game: str) -> Generator:
    """Openings of the game, one per seed; `data.args` are the environment's own, without `actions` and `discount`."""

    def make(rng: random.Random, **args: Any) -> Problem:
        seed = rng.randrange(1 << 31)
        played = TextGame(Task(seed=seed), game, **args)
        opening = played.reset()
        played.close()
        return Problem(opening, "", None, {"seed": seed}, key=f"{game} {seed}")

    return make
