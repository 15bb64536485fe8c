"""Callbacks: a program's own code at every moment of a run, on the thread that drives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.run.watcher import Watcher

if TYPE_CHECKING:
    from tidemill.data.survey import Lengths
    from tidemill.flow.records import Activity, Evaluation
    from tidemill.flow.workers import Workers
    from tidemill.recipe.config import Config
    from tidemill.run.summary import Summary
    from tidemill.trainer.trainer import Trainer


class Callback:
    """Override what you need. `trainer` may be asked to stop, to change a setting, to evaluate, generate or save; what
    a callback raises ends the run, whose checkpoints stay.

    A function given as a callback is called as `on_step_end` is.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Models are loaded and the workers are up; the first step comes next."""

    def on_step_begin(self, trainer: Trainer, step: int) -> None: ...

    def on_samples(self, trainer: Trainer, step: int, samples: list[dict[str, Any]]) -> None:
        """The step's samples are made and scored: those that `observe.samples_per_step` keeps for people."""

    def on_publish(self, trainer: Trainer, step: int, version: int) -> None:
        """Rollout has the step's weights."""

    def on_step_end(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None: ...

    def on_evaluate(self, trainer: Trainer, step: int, evaluation: Evaluation) -> None: ...

    def on_save(self, trainer: Trainer, step: int, checkpoint: Path) -> None: ...

    def on_warning(self, trainer: Trainer, step: int, sentence: str) -> None:
        """The run's health: what goes wrong, and what to try."""

    def on_end(self, trainer: Trainer, summary: Summary) -> None:
        """All steps are made, or the run was stopped; everything is saved."""


class _OneFunction(Callback):
    def __init__(self, function: Callable[[Trainer, int, dict[str, float]], object]) -> None:
        self.function = function

    def on_step_end(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        self.function(trainer, step, metrics)


def as_callback(given: Callback | Callable[[Trainer, int, dict[str, float]], object]) -> Callback:
    if isinstance(given, type) and issubclass(given, Callback):
        return given()
    return given if isinstance(given, Callback) else _OneFunction(given)


class Told(Watcher):
    """Passes what a run tells on to callbacks, and keeps what the trainer must know of a run under way."""

    def __init__(self, trainer: Trainer, callbacks: Sequence[Callback]) -> None:
        self.trainer, self.callbacks = trainer, callbacks
        self.step = 0

    def started(self, workers: Workers, first_step: int) -> None:
        self.step = first_step
        self.trainer._has_started(workers)
        for callback in self.callbacks:
            callback.on_start(self.trainer)

    def beginning(self, step: int) -> None:
        self.step = step
        for callback in self.callbacks:
            callback.on_step_begin(self.trainer, step)

    def published(self, step: int, version: int) -> None:
        for callback in self.callbacks:
            callback.on_publish(self.trainer, step, version)

    def sampled(self, step: int, read: Callable[[], list[dict[str, Any]]]) -> None:
        listening = [c for c in self.callbacks if type(c).on_samples is not Callback.on_samples]
        if listening:
            samples = read()
            for callback in listening:
                callback.on_samples(self.trainer, step, samples)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        for callback in self.callbacks:
            callback.on_evaluate(self.trainer, step, evaluation)

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        for callback in self.callbacks:
            callback.on_step_end(self.trainer, step, metrics)

    def saved(self, step: int, checkpoint: Path) -> None:
        for callback in self.callbacks:
            callback.on_save(self.trainer, step, checkpoint)

    def warned(self, sentence: str) -> None:
        for callback in self.callbacks:
            callback.on_warning(self.trainer, self.step, sentence)

    def ended(self, summary: Summary) -> None:
        for callback in self.callbacks:
            callback.on_end(self.trainer, summary)

    def stopping(self) -> bool:
        return self.trainer._wants_stop

    def of_warm_start(self) -> Watcher:
        return Watcher()


class All(Watcher):
    """Several watchers as one."""

    def __init__(self, *watchers: Watcher) -> None:
        self.watchers = watchers

    def _each(self, name: str, *args: Any) -> None:
        for watcher in self.watchers:
            getattr(watcher, name)(*args)

    def prepared(self, config: Config, lengths: Lengths) -> None:
        self._each("prepared", config, lengths)

    def doing(self, activity: Activity) -> None:
        self._each("doing", activity)

    def started(self, workers: Workers, first_step: int) -> None:
        self._each("started", workers, first_step)

    def beginning(self, step: int) -> None:
        self._each("beginning", step)

    def published(self, step: int, version: int) -> None:
        self._each("published", step, version)

    def sampled(self, step: int, read: Callable[[], list[dict[str, Any]]]) -> None:
        self._each("sampled", step, read)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self._each("evaluated", step, evaluation)

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        self._each("stepped", step, metrics)

    def saved(self, step: int, checkpoint: Path) -> None:
        self._each("saved", step, checkpoint)

    def noted(self, message: str) -> None:
        self._each("noted", message)

    def warned(self, sentence: str) -> None:
        self._each("warned", sentence)

    def ended(self, summary: Summary) -> None:
        self._each("ended", summary)

    def stopping(self) -> bool:
        return any(watcher.stopping() for watcher in self.watchers)

    def of_warm_start(self) -> Watcher:
        return All(*(watcher.of_warm_start() for watcher in self.watchers))


Callbacks = Sequence[Callback | Callable[["Trainer", int, dict[str, float]], object]]
Settings = Mapping[str, Any]
