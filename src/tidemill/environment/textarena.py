"""Games of the package textarena for one player. The game's text grows with each move; the model reads what is new."""

from __future__ import annotations

import random
from typing import Any

from tidemill.data.generators import Generator, Problem
from tidemill.environment.api import Maker, Task, Turn
from tidemill.errors import ConfigError, MissingExtra

SPEAKS = "\n[GAME]"  # what the game says begins with this; before it stands the echo of the player's move


class Game:
    def __init__(self, task: Task, game: str, **args: Any) -> None:
        try:
            self.game = package().make(game, **args)
        except (ValueError, KeyError) as error:
            raise ConfigError(f"environment textarena:{game}: {error}") from error
        self.seed, self.seen = int(task.meta.get("seed", task.seed)) % (1 << 31), ""

    def reset(self) -> str:
        self.game.reset(num_players=1, seed=self.seed)
        self.seen = self._all()
        return self.seen.strip()

    def step(self, text: str) -> Turn:
        is_done, _ = self.game.step(action=text)
        if is_done:
            rewards, _ = self.game.close()
            return Turn(is_done=True, reward=float((rewards or {}).get(0, 0.0)))
        before, self.seen = self.seen, self._all()
        new = self.seen.removeprefix(before)
        return Turn(new[max(new.find(SPEAKS), 0) :].strip())

    def _all(self) -> str:
        return str(self.game.get_observation()[1])


def package() -> Any:
    try:
        import textarena
    except ImportError:
        raise MissingExtra("environment.name: textarena:…", "textarena", "games") from None
    return textarena


def maker(game: str) -> Maker:
    package()
    return lambda task, **args: Game(task, game, **args)


def generator(game: str) -> Generator:
    """Openings of the game, one per seed."""

    def make(rng: random.Random, **args: Any) -> Problem:
        seed = rng.randrange(1 << 31)
        return Problem(Game(Task(seed=seed), game, **args).reset(), "", None, {"seed": seed}, key=f"{game} {seed}")

    return make
