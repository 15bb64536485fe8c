"""A game that is only seen: a blue player walks over a grid to a green goal and falls into red pits.

The rules, the pictures, and openings as problems; the environment `seen_grid` plays it on.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tidemill.data.generators import Problem
from tidemill.data.pictures.shapes import Paper
from tidemill.errors import DataError

Cell = tuple[int, int]  # row, column
MOVES: dict[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
ASK = "<image>"


@dataclass(frozen=True, slots=True)
class Grid:
    """Where everything is."""

    cells: int
    size: int  # pixels along each side of its picture
    player: Cell
    goal: Cell
    pits: tuple[Cell, ...]

    def moved(self, move: str) -> Grid:
        """The player one cell further; at the wall it stays where it is."""
        by = MOVES[move]
        row, column = (min(self.cells - 1, max(0, at + step)) for at, step in zip(self.player, by))
        return replace(self, player=(row, column))

    def picture(self) -> np.ndarray[Any, Any]:
        paper = Paper(self.size)
        for i in range(1, self.cells):
            at = round(i * self.size / self.cells)
            paper.line((0, at, self.size, at), "black")
            paper.line((at, 0, at, self.size), "black")
        for pit in self.pits:
            paper.shape("triangle", paper.cell(*pit, self.cells), "red")
        paper.shape("square", paper.cell(*self.goal, self.cells), "green")
        paper.shape("circle", paper.cell(*self.player, self.cells), "blue")
        return paper.pixels()

    def distance(self) -> int | None:
        """Moves to the goal around the pits; None where there is no way."""
        edge, seen, moves = {self.player}, {self.player}, 0
        while edge:
            if self.goal in edge:
                return moves
            edge = {replace(self, player=at).moved(move).player for at in edge for move in MOVES} - seen - {*self.pits}
            seen |= edge
            moves += 1
        return None

    def best(self) -> str:
        """A move that leads nearer to the goal."""
        ways = [(moved.distance(), move) for move in MOVES if (moved := self.moved(move)).player not in self.pits]
        return min((way, move) for way, move in ways if way is not None)[1]

    def meta(self) -> dict[str, Any]:
        return {
            "cells": self.cells,
            "size": self.size,
            "player": list(self.player),
            "goal": list(self.goal),
            "pits": [list(pit) for pit in self.pits],
        }

    @staticmethod
    def of(meta: Mapping[str, Any]) -> Grid:
        def cell(given: Any) -> Cell:
            return int(given[0]), int(given[1])

        pits = tuple(cell(pit) for pit in meta["pits"])
        return Grid(int(meta["cells"]), int(meta["size"]), cell(meta["player"]), cell(meta["goal"]), pits)


def seen_grid(rng: random.Random, cells: int = 4, pits: int = 1, size: int = 48, good: float = 0.5) -> Problem:
    """A picture of a grid; the player answers `up`, `down`, `left` or `right`, and sees the next one.

    The given response is one move, to warm up with: in a share `good` of the problems one that leads nearer, else a
    careless one, any of the four. RL has to find out that looking pays.
    """
    if not 0 <= good <= 1:
        raise DataError(f"data.args.good is a share from 0 to 1, got {good}")
    if not 3 <= cells <= 16 or not 0 <= pits <= cells:
        raise DataError(f"data.args: cells must be from 3 to 16 and pits from 0 to cells, got {cells} and {pits}")
    if not 8 * cells <= size <= 2048:
        raise DataError(f"data.args.size must be from {8 * cells} to 2,048 pixels for {cells} cells, got {size}")
    while True:
        player, goal, *holes = rng.sample([(r, c) for r in range(cells) for c in range(cells)], 2 + pits)
        grid = Grid(cells, size, player, goal, tuple(holes))
        if (grid.distance() or 0) >= 2:
            break
    meta = grid.meta()
    move = grid.best() if rng.random() < good else rng.choice(list(MOVES))
    return Problem(ASK, "", move, meta, images=(grid.picture(),), key=str(sorted(meta.items())))
