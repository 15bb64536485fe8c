"""Curriculum: harder problems once the easier ones are mostly solved, by measured accuracy.

One of the generator's settings takes the values of a list, one level each. The level is state: it goes into checkpoints
with the data position, so a resumed run sees the same problems.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tidemill.data import generators
from tidemill.data.source import Example
from tidemill.errors import DataError

if TYPE_CHECKING:
    from tidemill.recipe.config import CurriculumSettings as Settings


class Curriculum:
    """An endless source whose problems are those of the present level."""

    size = None

    def __init__(self, name: str, args: Mapping[str, Any], settings: Settings, seed: int) -> None:
        make = generators.find(name)
        self.name, self.settings = f"{name} (curriculum)", settings
        self.args = [{**args, settings.setting: value} for value in settings.values]
        for each in self.args:
            generators.check_args(name, make, each)
        self.sources = [generators.Generated(name, make, each, seed) for each in self.args]
        for source in self.sources:
            source.example(0)  # settings that cannot work are found now
        self.level = 0
        self.right = self.seen = 0.0

    def example(self, index: int) -> Example:
        return self.sources[self.level].example(index)

    def report(self, accuracy: float, samples: int) -> bool:
        """What a step measured; whether the level changed. A level is judged once `window` samples of it are in."""
        self.right += accuracy * samples
        self.seen += samples
        if self.seen < self.settings.window:
            return False
        measured, before = self.right / self.seen, self.level
        if measured >= self.settings.rise_above:
            self.level = min(self.level + 1, len(self.sources) - 1)
        elif measured < self.settings.fall_below:
            self.level = max(self.level - 1, 0)
        self.right = self.seen = 0.0
        return self.level != before

    def state(self) -> dict[str, float]:
        return {"level": self.level, "right": self.right, "seen": self.seen}

    def restore(self, state: Mapping[str, float]) -> None:
        self.level, self.right, self.seen = int(state["level"]), float(state["right"]), float(state["seen"])


def open_curriculum(name: str, args: Mapping[str, Any], settings: Settings, seed: int) -> Curriculum:
    if not generators.is_generator(name):
        raise DataError(f"data.curriculum needs a generator, and data.source is {name!r}")
    return Curriculum(name, args, settings, seed)
