"""Games of the package textarena, for one player or several. A game's text grows with each move; who speaks next reads
what is new to it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from tidemill.data.generators import Generator, Problem
from tidemill.environment.api import GameMaker, Maker, Round, Task, Turn
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


class Several:
    """A game of several players, who speak in turn."""

    def __init__(self, task: Task, game: str, players: int, **args: Any) -> None:
        try:
            self.game = package().make(game, **args)
        except (ValueError, KeyError) as error:
            raise ConfigError(f"environment textarena:{game}: {error}") from error
        self.seats, self.seen = players, dict.fromkeys(range(players), "")
        self.seed = int(task.meta.get("seed", task.seed)) % (1 << 31)

    def reset(self) -> Round:
        self.game.reset(num_players=self.seats, seed=self.seed)
        return self._asked()

    def step(self, said: Mapping[int, str]) -> Round:
        [text] = said.values()
        is_done, _ = self.game.step(action=text)
        if not is_done:
            return self._asked()
        rewards, told = self.game.close()
        gained = {int(seat): float(reward) for seat, reward in (rewards or {}).items()}
        broken = sum(bool(one.get("invalid_move")) for one in (told or {}).values() if isinstance(one, Mapping))
        return Round(
            is_done=True,
            rewards=gained,
            solved={seat: gained.get(seat, 0.0) > 0 for seat in range(self.seats)},
            parts={"broken_rules": 1.0} if broken else {},
        )

    def _asked(self) -> Round:
        seat, text = self.game.get_observation()
        before, self.seen[seat] = self.seen[seat], str(text)
        return Round({seat: self.seen[seat].removeprefix(before).strip()})


def several(game: str, players: int) -> GameMaker:
    package()
    return lambda task, **args: Several(task, game, players, **args)


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
    """Openings of the game, one per seed; `data.args.players` is their number, where there are several."""

    def make(rng: random.Random, players: int = 1, **args: Any) -> Problem:
        seed = rng.randrange(1 << 31)
        if players > 1:
            [text] = Several(Task(seed=seed), game, players, **args).reset().asks.values()
        else:
            text = Game(Task(seed=seed), game, **args).reset()
        return Problem(text, "", None, {"seed": seed}, key=f"{game} {seed}")

    return make
