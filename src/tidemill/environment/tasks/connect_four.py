"""Connect Four: many boards as bits, and players of known strength to measure a policy by.

A board has 7 columns of 7 bits, the lowest first; the seventh row is always empty, so that no line runs over the edge.
`own` are the stones of the player to move, `taken` all stones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.device.compiled import library
from tidemill.errors import ConfigError
from tidemill.models.spaces import Spaces

Array = npt.NDArray[Any]
Boards = npt.NDArray[np.uint64]
COLUMNS, ROWS, STRIDE = 7, 6, 7
U = np.uint64
BOTTOM = np.array([1 << (STRIDE * c) for c in range(COLUMNS)], U)
TOP = np.array([1 << (STRIDE * c + ROWS - 1) for c in range(COLUMNS)], U)
FULL = U(sum(((1 << ROWS) - 1) << (STRIDE * c) for c in range(COLUMNS)))
CELLS = np.array([1 << (STRIDE * c + r) for r in range(ROWS) for c in range(COLUMNS)], U)
SOURCE = Path(__file__).with_name("connect_four.c")
CELL = 24  # pixels of a picture
DEPTH = 8  # moves that the strong player looks ahead


def has_four(stones: Boards) -> Array:
    found = np.zeros(stones.shape, np.bool_)
    for step in (1, STRIDE - 1, STRIDE, STRIDE + 1):
        pairs = stones & (stones >> U(step))
        found |= (pairs & (pairs >> U(2 * step))) != 0
    return found


def legal(taken: Boards) -> Array:
    """(boards, columns)"""
    return np.asarray((taken[..., None] & TOP) == 0)


def dropped(taken: Boards, column: Array) -> Boards:
    """The new stone's bit."""
    held: Boards = (taken + BOTTOM[column]) & ~taken
    return held & FULL


class ConnectFour:
    """A `TurnGame`: stones of both players and the legal columns are seen from the side of the player to move."""

    def __init__(self, count: int) -> None:
        self.spaces = Spaces(observation=(2 * ROWS * COLUMNS + COLUMNS,), choices=(COLUMNS,), masked=True)
        self.own, self.taken = np.zeros(count, U), np.zeros(count, U)

    def begin(self, slots: Array) -> None:
        self.own[slots] = self.taken[slots] = 0

    def seen(self, slots: Array) -> Array:
        own, taken = self.own[slots], self.taken[slots]
        planes = [(stones[:, None] & CELLS) != 0 for stones in (own, taken ^ own)]
        return np.concatenate([*planes, legal(taken)], 1).astype(np.float32)

    def to_move(self, slots: Array) -> Array:
        return np.bitwise_count(self.taken[slots]) & 1

    def move(self, slots: Array, moves: Array) -> tuple[Array, Array]:
        own, taken = self.own[slots], self.taken[slots]
        stone = dropped(taken, moves)
        is_legal = stone != 0
        own, taken = own | stone, taken | stone
        won = has_four(own) & is_legal
        self.own[slots], self.taken[slots] = taken ^ own, taken  # the other is to move
        over = won | (taken == FULL) | ~is_legal
        return over, np.where(won, 1.0, np.where(is_legal, 0.0, -1.0))

    def picture(self, slot: int) -> Array:
        """Red is the player who began."""
        own, taken = self.own[slot], self.taken[slot]
        first = own if not np.bitwise_count(taken) & 1 else taken ^ own
        y, x = np.mgrid[0:CELL, 0:CELL]
        disc = (y - CELL / 2 + 0.5) ** 2 + (x - CELL / 2 + 0.5) ** 2 < (0.4 * CELL) ** 2
        board = np.full((ROWS * CELL, COLUMNS * CELL, 3), (30, 60, 160), np.uint8)
        for i, bit in enumerate(CELLS):
            row, column = divmod(i, COLUMNS)
            colour = (235, 235, 235) if not taken & bit else (210, 40, 40) if first & bit else (240, 200, 30)
            top = (ROWS - 1 - row) * CELL
            board[top : top + CELL, column * CELL : (column + 1) * CELL][disc] = colour
        return board

    # Players of known strength: what is seen and a number from 0 to 1 for each board, to columns

    players: Mapping[str, Callable[[Array, Array], Array]] = {}


def read(seen: Array) -> tuple[Boards, Boards]:
    """Stones of the player to move, and all stones."""
    cells = ROWS * COLUMNS
    own, other = ((seen[:, i * cells : (i + 1) * cells] > 0.5).astype(U) @ CELLS for i in range(2))
    return own.astype(U), (own | other).astype(U)


def any_of(allowed: Array, chance: Array) -> Array:
    """One of each board's allowed columns, each as likely."""
    place = (chance * allowed.sum(1)).astype(np.int64)
    return np.asarray((allowed.cumsum(1) > place[:, None]).argmax(1))


def random_player(seen: Array, chance: Array) -> Array:
    return any_of(legal(read(seen)[1]), chance)


def winning(own: Boards, taken: Boards) -> Array:
    """(boards, columns) moves that make four."""
    columns = np.arange(COLUMNS)
    stones = dropped(taken[:, None], columns[None])
    return np.asarray(has_four(own[:, None] | stones) & (stones != 0))


def two_ply(seen: Array, chance: Array) -> Array:
    """Takes a win that is there, else stops one of the other's, else moves anywhere."""
    own, taken = read(seen)
    allowed = legal(taken)
    for threats in (winning(taken ^ own, taken), winning(own, taken)):  # the more urgent one last
        allowed = np.where(threats.any(1, keepdims=True), threats, allowed)
    return any_of(allowed, chance)


def one_ply(seen: Array, chance: Array) -> Array:
    """Takes a win that is there, else moves anywhere."""
    own, taken = read(seen)
    wins = winning(own, taken)
    return any_of(np.where(wins.any(1, keepdims=True), wins, legal(taken)), chance)


def solver(seen: Array, chance: Array, depth: int = DEPTH) -> Array:
    """A best column by search `depth` moves ahead, exact where the game is over within them; of several any."""
    own, taken = read(seen)
    worth = scores(own, taken, depth)
    return any_of(worth == worth.max(1, keepdims=True), chance)


def scores(own: Boards, taken: Boards, depth: int) -> Array:
    """(boards, columns) what each column comes to: above 0 a win, the sooner the more; below 0 a loss; 0 neither."""
    found = np.empty((len(own), COLUMNS), np.int32)
    code = _code()
    boards = [np.ascontiguousarray(side, U) for side in (own, taken)]
    code.tm_connect_four(*(side.ctypes.data for side in boards), len(own), depth, found.ctypes.data)
    return found


@cache
def _code() -> ctypes.CDLL:
    found = library(SOURCE)
    if found is None:
        raise ConfigError("connect_four's solver is written in C, and there is no C compiler", "install gcc or clang")
    found.tm_connect_four.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2 + [ctypes.c_void_p]
    return found


ConnectFour.players = {"random": random_player, "one_ply": one_ply, "two_ply": two_ply, "solver": solver}
