"""Several workers of one stage as one: a worker for each step that may be in the dock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidemill.flow.adjust import adjust
from tidemill.flow.stage import Worker


class EveryStep:
    """Polls all of them, so that what replaces a step's dropped groups is on its way before the step is learned from.
    For stages that look at groups alone and not at a whole step."""

    waits = False

    def __init__(self, name: str, workers: Sequence[Worker]) -> None:
        self.name, self.workers = name, workers

    def adjust(self, changes: Mapping[str, float]) -> None:
        adjust(self.workers, changes)

    def begin(self, first_group: int, tag: str | None) -> None:
        """Each has its tag already."""

    def poll(self) -> bool:
        moves = [worker.poll() for worker in self.workers]
        return any(moves)
