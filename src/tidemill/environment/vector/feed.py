"""The rows of a run whose policy is a network: each is a fragment to be made, so many decisions of one environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tidemill.algorithms.shared import registry
from tidemill.batch import GROUP, ID, LENGTH, Batch
from tidemill.recipe.config import Config


class FragmentFeed:
    """Group g is fragment g // vectors of vector g % vectors: environments that step together. Where samples are read
    many times, a run that goes on feeds those again that were kept: rollout plays their moves once more."""

    left_out = 0  # rows of data that cannot be used

    def __init__(self, config: Config) -> None:
        self.config, self.kept_groups = config, kept_groups(config)
        self.groups = 0
        self.places: list[int] = []
        self.stop: Callable[[], bool] = lambda: False
        self._again = range(0)

    def rows(self, prompts: int | None = None) -> Batch:
        count = prompts or self.config.train.prompts_per_step
        own = range(self.groups, self.groups + count)
        self.groups, self.places = own.stop, list(own)
        again, self._again = self._again, range(0)
        return self._rows([*own, *again], len(again))

    def rows_again(self, groups: Sequence[int], places: Sequence[int]) -> Batch:
        return self._rows(list(groups), 0)

    def _rows(self, groups: list[int], again: int) -> Batch:
        n = self.config.train.samples_per_prompt
        numbers = np.repeat(np.array(groups, np.int64), n)
        columns: dict[str, Any] = {
            ID: numbers * n + np.tile(np.arange(n), len(groups)),
            GROUP: numbers,
            "group_size": np.full(len(numbers), n, np.int32),
            LENGTH: np.full(len(numbers), self.config.rollout.max_new_tokens, np.int32),
        }
        if self.kept_groups:
            is_again = np.arange(len(groups)) >= len(groups) - again
            columns["again"] = np.repeat(is_again, n).astype(np.uint8)
        return Batch(columns)

    def state(self) -> dict[str, Any]:
        return {"groups": self.groups}

    def restore(self, state: dict[str, Any]) -> None:
        self.groups = int(state["groups"])
        self._again = range(max(0, self.groups - self.kept_groups), self.groups)

    def take_cut(self) -> int:
        return 0  # responses in the data that are too long

    def report(self, metrics: dict[str, float]) -> None:
        """Nothing here follows a step's metrics."""


def kept_groups(config: Config) -> int:
    """Groups whose samples stay in the dock, where they are learned from many times."""
    if not registry.of(config).is_replayed:
        return 0
    decisions = config.train.samples_per_prompt * config.rollout.max_new_tokens
    return -(-config.algorithm.replay.capacity // decisions)
