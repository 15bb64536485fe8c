"""Workers: all that the loop asks of whoever does the work, in this process or on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from tidemill.errors import TidemillError
from tidemill.flow.records import Activity, Evaluation
from tidemill.recipe.config import Config

ALL_STAGES = "all"


class Stopped(Exception):
    """The user asked to stop, at a moment when the step could be left without losing an update."""


class Rewound(TidemillError):
    """The learner was lost with its weights: the run goes on from its newest checkpoint."""


class Workers(Protocol):
    """Made by `cluster.start.choose.start`. The loop sees nothing else of where the work is done."""

    config: Config

    @property
    def parameters(self) -> int:
        """Of the model."""

    @property
    def bad_rows(self) -> int:
        """Rows of the data that could not be used, so far."""

    def stages(self, number: int, stop: Callable[[], bool]) -> Iterator[str]:
        """Feed, roll out, score, learn, and serve the new weights: a step, driven by whoever takes the names of the
        stages that are done, one after the other. Stages that work at once are done at once, as `ALL_STAGES`.
        `Stopped`: nothing of the step has happened."""

    def adjust(self, changes: Mapping[str, float]) -> str:
        """Between two steps: hold other values of some settings from now on. A sentence where that cannot be; then
        nothing has changed."""

    def measure(self) -> dict[str, float]:
        """What the step came to, `version` included; counting starts anew."""

    def after_step(self, step: int, measured: dict[str, float]) -> list[str]:
        """What changes between steps. Gives new warnings, in words."""

    def write_samples(self, step: int) -> str:
        """Some of the step's, for people to look at; gives the first error of a reward among them, or ""."""

    def evaluate(self, size: int, samples: int, tell: Callable[[Activity], None] = lambda activity: None) -> Evaluation:
        """`tell` hears how far it is; it may raise `Stopped`."""

    def activity(self) -> Activity | None:
        """What a step is at, where that is known."""

    def save(
        self, folder: Path, step: int, state: dict[str, Any], *, best: bool = False, metric: float | None = None
    ) -> None:
        """A checkpoint; `state` is the loop's own part of it."""

    def restore(self, path: Path) -> dict[str, Any]:
        """Go on from a checkpoint; gives its state."""

    def rewind(self) -> None:
        """After `Rewound`: be as at the start, ready for `restore`."""

    def keep_definition(self, run: Path) -> None:
        """So that the run's checkpoints can be opened without whatever it started from."""

    def save_model(self, folder: Path) -> None: ...

    def close(self) -> None: ...
