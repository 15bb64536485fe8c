"""What a run tells whoever watches: the command line draws it, a trainer calls callbacks, tests ignore it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # whoever only draws needs no torch
    from tidemill.data.survey import Lengths
    from tidemill.flow.records import Activity, Evaluation
    from tidemill.flow.workers import Workers
    from tidemill.recipe.config import Config
    from tidemill.run.summary import Summary


class Watcher:
    """Hears nothing of what it does not override."""

    def prepared(self, config: Config, lengths: Lengths) -> None: ...
    def doing(self, activity: Activity) -> None: ...
    def started(self, workers: Workers, first_step: int) -> None: ...
    def beginning(self, step: int) -> None: ...
    def published(self, step: int, version: int) -> None: ...
    def sampled(self, step: int, read: Callable[[], list[dict[str, Any]]]) -> None:
        """`read` gives the samples of the step that are kept for people."""

    def evaluated(self, step: int, evaluation: Evaluation) -> None: ...
    def stepped(self, step: int, metrics: dict[str, float]) -> None: ...
    def ended(self, summary: Summary) -> None: ...
    def saved(self, step: int, checkpoint: Path) -> None: ...
    def noted(self, message: str) -> None: ...
    def stopping(self) -> bool:
        """Whether it wants the run to end at the next safe moment."""
        return False

    def of_warm_start(self) -> Watcher:
        """Who is told of the run that makes the model to start from."""
        return self

    def warned(self, sentence: str) -> None:
        """A health warning: what goes wrong, and what to try."""
        self.noted(sentence)
