"""Games of two players with an exact solver: Nim and tic-tac-toe. Zero-sum: what one wins, the other loses."""

from __future__ import annotations

import random
from collections.abc import Mapping

from tidemill.data.nim import opening, reply
from tidemill.data.tictactoe import MARKS, has_won, placed, shown, to_move, value
from tidemill.environment.api import Round, Task


def decided(winner: int, broken: int = 0) -> Round:
    rewards = {winner: 1.0, 1 - winner: -1.0}
    parts = {"broken_rules": float(broken)} if broken else {}
    return Round(is_done=True, rewards=rewards, solved={winner: True, 1 - winner: False}, parts=parts)


class NimDuel:
    """Sticks lie in a heap, both take some in turn, who takes the last one wins. A turn is a number of sticks."""

    seats = 2

    def __init__(self, task: Task) -> None:
        self.heap, self.most = int(task.meta["heap"]), int(task.meta["most"])
        self.turn = 0
        self.chance = random.Random(int(task.meta["seed"]))

    def reset(self) -> Round:
        return Round({0: opening(self.heap, self.most)})

    def step(self, said: Mapping[int, str]) -> Round:
        [(seat, text)] = said.items()
        word = text.strip()
        move = int(word) if word.isdecimal() and len(word) < 4 else 0
        if not 1 <= move <= min(self.most, self.heap):
            return decided(1 - seat, broken=1)
        self.heap, self.turn = self.heap - move, self.turn + 1
        if self.heap == 0:
            return decided(seat)
        begins = self.turn > 1  # the other has spoken before
        return Round({1 - seat: f"{' ' if begins else ''}{opening(self.heap, self.most)}"})

    def expert(self, seat: int) -> str:
        return str(reply(self.heap, self.most, self.chance))


class TicTacToe:
    """A turn is a cell from 1 to 9, rows from above. `XO.......X:` is the board and whose turn it is."""

    seats = 2

    def __init__(self, task: Task) -> None:
        self.board = str(task.meta.get("board", "." * 9))
        self.chance = random.Random(int(task.meta.get("seed", task.seed)))

    def reset(self) -> Round:
        return Round({to_move(self.board): shown(self.board)})

    def step(self, said: Mapping[int, str]) -> Round:
        [(seat, text)] = said.items()
        word = text.strip()
        cell = int(word) - 1 if len(word) == 1 and word.isdecimal() else -1
        if not (0 <= cell < 9 and self.board[cell] == "."):
            return decided(1 - seat, broken=1)
        self.board = placed(self.board, cell)
        if has_won(self.board, MARKS[seat]):
            return decided(seat)
        if "." not in self.board:
            return Round(is_done=True, rewards={0: 0.0, 1: 0.0}, solved={0: True, 1: True}, parts={"draws": 1.0})
        return Round({1 - seat: shown(self.board)})

    def expert(self, seat: int) -> str:
        """A best move; of several any, so that no opening is always the same."""
        moves = [i for i in range(9) if self.board[i] == "."]
        worth = {i: -value(placed(self.board, i)) for i in moves}
        return str(self.chance.choice([i for i in moves if worth[i] == max(worth.values())]) + 1)
