"""Combines several workers of one stage: one for each step that may be in the dock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidemill.flow.adjust import adjust
from tidemill.flow.stages.stage import Worker


class EveryStep:
    """Polls all of them, so that replacements of a step's dropped groups are on their way before the step is learned
    from. For stages that look at single groups, not at a whole step."""

    waits = False

    def __init__(self, name: str, workers: Sequence[Worker]) -> None:
        self.name, self.workers = name, workers

    def adjust(self, changes: Mapping[str, float]) -> None:
        adjust(self.workers, changes)

    def begin(self, first_group: int, tag: str | None) -> None:
        """Do nothing: each has its tag already."""

    def poll(self) -> bool:
        moves = [worker.poll() for worker in self.workers]
        return any(moves)
