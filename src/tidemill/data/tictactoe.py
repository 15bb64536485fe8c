"""Tic-tac-toe as problems: boards from which neither side can force a win, and the rules that its game plays by.

A board is nine characters, rows from above: `X`, `O` or `.`; X moves first.
"""

from __future__ import annotations

import random
from functools import lru_cache

from tidemill.data.generators import Problem

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
MARKS = "XO"


def shown(board: str) -> str:
    return f"{board}{MARKS[to_move(board)]}:"


def to_move(board: str) -> int:
    return (9 - board.count(".")) % 2


def placed(board: str, cell: int) -> str:
    return f"{board[:cell]}{MARKS[to_move(board)]}{board[cell + 1 :]}"


def has_won(board: str, mark: str) -> bool:
    return any(all(board[i] == mark for i in line) for line in LINES)


@lru_cache(maxsize=8192)
def value(board: str) -> int:
    """1, 0 or −1 for the player to move, both playing perfectly."""
    if has_won(board, MARKS[1 - to_move(board)]):
        return -1
    moves = [i for i in range(9) if board[i] == "."]
    return max(-value(placed(board, i)) for i in moves) if moves else 0


def tictactoe(rng: random.Random, moves: tuple[int, int] = (0, 2)) -> Problem:
    """Boards after some random moves from which neither side can force a win, and the seat that an evaluation plays.

    The given response is careless play, to warm up with: any free cells, as one seat would play them.
    """
    while True:
        board = "." * 9
        for _ in range(rng.randint(*moves)):
            board = placed(board, rng.choice([i for i in range(9) if board[i] == "."]))
        if value(board) == 0:
            break
    seed, seat = rng.randrange(1 << 16), rng.randrange(2)
    meta = {"board": board, "seed": seed, "seat": seat}
    return Problem(shown(board), "", careless(rng, board), meta, key=f"{board} {seat} {seed}")


def careless(rng: random.Random, board: str) -> str:
    """A game of random moves as the first to move reads it."""
    seat, said = to_move(board), ""
    while True:
        free = [i for i in range(9) if board[i] == "."]
        cell = rng.choice(free)
        own = to_move(board) == seat
        said += str(cell + 1) if own else ""
        board = placed(board, cell)
        if has_won(board, MARKS[1 - to_move(board)]) or "." not in board:
            return said
        if not own:
            said += f" {shown(board)}"
