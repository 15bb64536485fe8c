"""Games of two players who move in turn, as environments of one: the other player is part of what happens.

Many games go on side by side. After each move of the learning player the others answer, those with the same opponent in
one call. Which seat is whose follows from an episode's seed. Their moves are chance from the learner's side: who brings
games back gives them (`script`).
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tidemill.environment.vector.random import uniform
from tidemill.environment.vector.slots import GOES_ON, TERMINAL, Ints, Stepped
from tidemill.models.spaces import Spaces

Array = npt.NDArray[Any]
MOST_PLIES = 1 << 12  # of one game, each with chance of its own
ANSWERS = 2  # the others' moves in one step at most: an answer, and the first move of a new game


class TurnGame(Protocol):
    """Games of two players, one in each slot."""

    spaces: Spaces

    def begin(self, slots: Ints) -> None: ...

    def seen(self, slots: Ints) -> Array:
        """What the player to move sees."""

    def to_move(self, slots: Ints) -> Array:
        """0 or 1."""

    def move(self, slots: Ints, moves: Array) -> tuple[Array, Array]:
        """Whether each game is over, and what the player who moved gained: 1, 0 or −1."""


class Others(Protocol):
    """Who sits on the other side."""

    def draw(self, seeds: Ints) -> Ints:
        """An opponent for each new game, as a number."""

    def answer(self, opponent: int, seen: Array, chance: Array) -> Array:
        """Moves of one opponent in several games. `chance`: a number from 0 to 1 for each."""

    def ended(self, opponents: Ints, seeds: Ints, seats: Ints, scores: Array) -> None:
        """Games are over: what the learning player scored."""


class Anyone:
    """One who makes any legal move."""

    def __init__(self, spaces: Spaces) -> None:
        self.width = sum(spaces.choices)
        self.is_masked = spaces.masked

    def draw(self, seeds: Ints) -> Ints:
        return np.zeros(len(seeds), np.int64)

    def answer(self, opponent: int, seen: Array, chance: Array) -> Array:
        allowed = seen[:, -self.width :] > 0.5 if self.is_masked else np.ones((len(seen), self.width), np.bool_)
        place = (chance * allowed.sum(1)).astype(np.int64)
        return np.asarray((allowed.cumsum(1) > place[:, None]).argmax(1))

    def ended(self, opponents: Ints, seeds: Ints, seats: Ints, scores: Array) -> None:
        """Nobody keeps scores."""


class DuelSlots:
    """`Slots` of a game. Until others are met, any legal moves are answered."""

    is_joint = False

    def __init__(self, game: TurnGame, count: int) -> None:
        self.game, self.count, self.spaces = game, count, game.spaces
        self.others: Others = Anyone(game.spaces)
        self.seat, self.opponent = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.seeds, self.ply = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.answers = np.full((count, ANSWERS), -1, np.int16)  # of the last step or reset; −1: none
        self.script: Array | None = None  # (slots of the next call, ANSWERS): what the others do

    def reset(self, slots: Ints, seeds: Ints) -> Array:
        self.answers[slots] = -1
        self._begin(slots, seeds, 0)
        return self.game.seen(slots)

    def _begin(self, slots: Ints, seeds: Ints, at: int) -> None:
        self.game.begin(slots)
        self.seeds[slots], self.seat[slots], self.ply[slots] = seeds, seeds & 1, 0
        self.opponent[slots] = self.others.draw(seeds)
        self._let_answer(slots[self.seat[slots] == 1], at)

    def step(self, slots: Ints, moves: Array, seeds: Ints) -> Stepped:
        self.answers[slots] = -1
        over, gained = self.game.move(slots, moves[:, 0])
        self.ply[slots] += 1
        gains = gained.astype(np.float64)
        going = slots[~over]
        lost, theirs = self._let_answer(going, 0)
        gains[np.searchsorted(slots, going)] -= theirs
        ended = over.copy()
        ended[np.searchsorted(slots, going[lost])] = True
        ends = np.where(ended, TERMINAL, GOES_ON).astype(np.uint8)
        again = slots[ended]
        if len(again):
            self.others.ended(self.opponent[again], self.seeds[again], self.seat[again], gains[ended])
            finals = self.game.seen(slots)
            self._begin(again, seeds[ended], 1)
            return Stepped(self.game.seen(slots), gains, ends, finals)
        seen = self.game.seen(slots)
        return Stepped(seen, gains, ends, seen)

    def _let_answer(self, slots: Ints, at: int) -> tuple[Array, Array]:
        """The others' moves in these slots; whether that ended the game, and what they gained."""
        over, gained = np.zeros(len(slots), np.bool_), np.zeros(len(slots))
        if not len(slots):
            return over, gained
        moves = np.zeros(len(slots), np.int64)
        if self.script is not None:
            moves[:] = self.script[slots, at]
        else:
            seen, opponents = self.game.seen(slots), self.opponent[slots]
            for opponent in np.unique(opponents):
                own = np.flatnonzero(opponents == opponent)
                chance = uniform(self.seeds[slots[own]] * MOST_PLIES + self.ply[slots[own]], np.zeros(1, np.int64))[
                    :, 0
                ]
                moves[own] = self.others.answer(int(opponent), seen[own], chance)
        self.answers[slots, at] = moves
        self.ply[slots] += 1
        return self.game.move(slots, moves)

    def close(self) -> None:
        """Games hold nothing."""
