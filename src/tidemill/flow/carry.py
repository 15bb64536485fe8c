"""Carry-over: more prompts are in rollout than a step learns from. The step takes the groups that finish first; what is
unfinished goes on in the next step, with the tokens it has and their versions. No group is learned from more than
`flow.max_staleness` steps after it entered."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import ceil

from tidemill.dock import Dock
from tidemill.recipe.config import Config

IN_ROLLOUT, TAKEN = "in rollout", "step"  # tags: of groups that no step has taken yet, and of the step's own


def prompts_in_rollout(config: Config, step: int) -> int:
    """Return how many prompts are in rollout when `step` begins: not more than the run has yet to learn from."""
    train = config.train
    most = ceil(train.prompts_per_step * (1 + config.flow.carry_over))
    return min(most, train.prompts_per_step * (train.steps - step + 1))


class CarryOver:
    """Takes a step's groups out of those in rollout."""

    def __init__(self, config: Config) -> None:
        self.per_step = config.train.prompts_per_step
        rounds = config.algorithm.dynamic_sampling_rounds if config.algorithm.dynamic_sampling else 0
        self.most = self.per_step * (1 + rounds)  # replacements of dropped groups included
        self.limit = config.flow.max_staleness
        self.step = 0
        self.entered: dict[int, int] = {}  # groups in rollout → the step at which they entered
        self.taken: set[int] = set()
        self.is_closed = False  # the step is being learned

    def begin(self, step: int, under_way: Sequence[Sequence[int]]) -> None:
        """Begin a step; `under_way`: group, place in the data and step at which it entered, of each in rollout."""
        self.step, self.taken, self.is_closed = step, set(), False
        self.entered = {group: entered for group, _, entered in under_way}

    def lacks(self, dock: Dock) -> int:
        """Return how many more groups the step needs."""
        if self.is_closed:
            return 0
        here = len(dock.finished("rollout", TAKEN))
        return max(0, min(self.per_step - here, self.most - len(self.taken)))

    def fill(self, dock: Dock) -> bool:
        """Take groups if enough have finished; return whether the step has what it needs."""
        if dock.progress("rollout", TAKEN).pending:  # rows of the step came back
            return False
        need = self.lacks(dock)
        if not need:
            return True
        chosen = choose(dock.finished("rollout", IN_ROLLOUT), self.entered, need, self.step, self.limit, self.per_step)
        if not chosen:
            return False
        dock.retag(chosen, TAKEN)
        self.taken.update(chosen)
        for group in chosen:
            self.entered.pop(group, None)
        return True

    def left(self, under_way: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return those of `under_way` that the step has not taken."""
        return [list(one) for one in under_way if one[0] not in self.taken]


def choose(
    finished: Sequence[int], entered: Mapping[int, int], need: int, step: int, limit: int, per_step: int
) -> list[int]:
    """Choose the `need` oldest finished groups; none if there are too few, or if those left over could not all be
    learned in time, `per_step` in each step to come: then an old group must finish first."""
    chosen = list(finished[:need])
    if len(chosen) < need:
        return []
    left = entered.keys() - set(chosen)
    return chosen if all(_due(left, entered, step + k - limit) <= k * per_step for k in range(limit)) else []


def _due(groups: Collection[int], entered: Mapping[int, int], step: int) -> int:
    return sum(entered[group] <= step for group in groups)
