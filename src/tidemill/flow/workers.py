"""Workers: the interface between the loop and whatever does the work, in this process or on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tidemill.errors import TidemillError
from tidemill.flow.records import Activity, Evaluation
from tidemill.observe.machine import Readings
from tidemill.recipe.config import Config

ALL_STAGES = "all"


class Stopped(Exception):
    """The user asked to stop at a moment when the step could be left without losing an update."""


class Rewound(TidemillError):
    """The learner was lost with its weights: the run continues from its newest checkpoint."""


@dataclass(frozen=True, slots=True)
class MachineReport:
    """What a process that works says of its device: kind, name and the data sheet's rate (0: unknown), and what it read
    in the step."""

    kind: str = "cpu"
    name: str = ""
    flops: float = 0.0
    node: str = ""
    readings: Readings = field(default_factory=Readings)


class Workers(Protocol):
    """Made by `cluster.start.choose.start`. The loop knows nothing else about where the work is done."""

    config: Config
    home: str  # the driver's node

    @property
    def machines(self) -> Mapping[str, MachineReport]:
        """What workers that are processes of their own read in the step that was measured last."""

    @property
    def parameters(self) -> int:
        """Of the model."""

    @property
    def bad_rows(self) -> int:
        """Rows of the data that could not be used so far."""

    def stages(self, number: int, stop: Callable[[], bool]) -> Iterator[str]:
        """Run a step: feed, roll out, score, learn, and serve the new weights. Yields the names of stages as they
        are done, one after the other; stages that work at the same time are yielded together, as `ALL_STAGES`.
        `Stopped`: nothing of the step has happened."""

    def adjust(self, changes: Mapping[str, float]) -> str:
        """Change some settings between two steps. Returns a sentence where that is impossible; then nothing has
        changed."""

    def measure(self) -> dict[str, float]:
        """Return the step's metrics, `version` included, and reset the counts."""

    def after_step(self, step: int, measured: dict[str, float]) -> list[str]:
        """Apply what changes between steps; return new warnings as text."""

    def write_samples(self, step: int) -> str:
        """Write some of the step's samples, for people to look at; return the first error of a reward among them, or
        ""."""

    def evaluate(self, size: int, samples: int, tell: Callable[[Activity], None] = lambda activity: None) -> Evaluation:
        """Evaluate. `tell` receives the progress; it may raise `Stopped`."""

    def activity(self) -> Activity | None:
        """What a step is doing, where that is known."""

    def save(
        self, folder: Path, step: int, state: dict[str, Any], *, best: bool = False, metric: float | None = None
    ) -> None:
        """Save a checkpoint; `state` is the loop's own part of it."""

    def restore(self, path: Path) -> dict[str, Any]:
        """Continue from a checkpoint; return its state."""

    def rewind(self) -> None:
        """Return to the initial state after `Rewound`, ready for `restore`."""

    def keep_definition(self, run: Path) -> None:
        """Keep the model's definition, so that the run's checkpoints can be opened without the model it started
        from."""

    def save_model(self, folder: Path) -> None: ...

    def close(self) -> None: ...
