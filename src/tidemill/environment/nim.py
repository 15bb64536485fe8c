"""The game of Nim against an opponent that does not slip; `data/nim.py` has its rules and makes its openings."""

from __future__ import annotations

import random

from tidemill.data.nim import opening, reply
from tidemill.environment.api import Task, Turn


class Nim:
    """A turn is a number of sticks. A winner gets 1; a loser, or who breaks a rule, 0."""

    def __init__(self, task: Task) -> None:
        self.heap, self.most = int(task.meta["heap"]), int(task.meta["most"])
        self.opponent = random.Random(int(task.meta["seed"]))

    def reset(self) -> str:
        return opening(self.heap, self.most)

    def step(self, text: str) -> Turn:
        said = text.strip()
        move = int(said) if said.isdecimal() and len(said) < 4 else 0
        if not 1 <= move <= min(self.most, self.heap):
            return Turn(is_done=True, is_solved=False, parts={"broken_rules": 1.0})
        self.heap -= move
        if self.heap == 0:
            return Turn(is_done=True, reward=1.0, is_solved=True)
        self.heap -= reply(self.heap, self.most, self.opponent)
        if self.heap == 0:
            return Turn(is_done=True, is_solved=False)
        return Turn(f" {opening(self.heap, self.most)}")
