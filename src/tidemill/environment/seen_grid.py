"""The grid game that is only seen; `data/seen_grid.py` has its rules and makes its openings."""

from __future__ import annotations

from tidemill.data.seen_grid import ASK, MOVES, Grid
from tidemill.environment.api import Task, Turn


class SeenGrid:
    """A turn is a move, which a new picture answers. Who reaches the goal in time gets 1, all others 0.

    `spare`: moves beyond the shortest way.
    """

    def __init__(self, task: Task, spare: int = 2) -> None:
        self.grid = Grid.of(task.meta)
        self.left = (self.grid.distance() or 0) + spare

    def reset(self) -> str:
        return ASK

    def step(self, text: str) -> Turn:
        move = text.strip().lower().rstrip(".")
        if move not in MOVES:
            return Turn(is_done=True, is_solved=False, parts={"broken_rules": 1.0})
        self.grid, self.left = self.grid.moved(move), self.left - 1
        if self.grid.player == self.grid.goal:
            return Turn(is_done=True, reward=1.0, is_solved=True)
        if self.grid.player in self.grid.pits:
            return Turn(is_done=True, is_solved=False, parts={"falls": 1.0})
        if self.left == 0:
            return Turn(is_done=True, is_solved=False, parts={"too_slow": 1.0})
        return Turn(ASK, images=(self.grid.picture(),))
