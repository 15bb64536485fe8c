"""A step driven by hand: its stages one after the other, then what it came to."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidemill.errors import TidemillError

if TYPE_CHECKING:
    from tidemill.run.loop import Moment
    from tidemill.run.summary import Summary


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage that is done: rollout, reward, advantage, learn, …; `all` where the schedule runs them at once."""

    name: str
    seconds: float


@dataclass(slots=True)
class Step:
    """One step of a run. `stages()` does one stage after the other; whatever was not asked for is done when the step's
    metrics are looked at, or when the next step begins."""

    number: int
    _advance: Callable[[], Moment | None]
    _read_samples: Callable[[], list[dict[str, Any]]]
    _metrics: dict[str, float] | None = None
    done: list[Stage] = field(default_factory=list)
    _since: float = field(default_factory=time.perf_counter)

    @property
    def is_done(self) -> bool:
        return self._metrics is not None

    def stages(self) -> Iterator[Stage]:
        """Do the step a stage at a time (`flow.schedule: sync`; the others run their stages at once)."""
        given = 0
        while True:
            while given < len(self.done):
                given += 1
                yield self.done[given - 1]
            if not self._go_on():
                return

    def finish(self) -> dict[str, float]:
        """Do what is left of the step; its metrics."""
        while self._go_on():
            pass
        if self._metrics is None:
            raise TidemillError(f"step {self.number} was stopped before its end", "its run can be resumed")
        return self._metrics

    @property
    def metrics(self) -> dict[str, float]:
        return self.finish()

    @property
    def reward(self) -> float | None:
        return self.metrics.get("reward")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The step's samples that the run keeps (`observe.samples_per_step`)."""
        self.finish()
        return self._read_samples()

    def _go_on(self) -> bool:
        """Take the step's next moment; whether there was one."""
        from tidemill.run.loop import StageDone, StepDone

        if self.is_done:
            return False
        self._since = time.perf_counter()
        moment = self._advance()
        if isinstance(moment, StageDone):
            self.done.append(Stage(moment.stage, time.perf_counter() - self._since))
        elif isinstance(moment, StepDone):
            self._metrics = moment.metrics
        return moment is not None


def steps_of(
    moments: Generator[Moment, None, Summary], read_samples: Callable[[int], list[dict[str, Any]]]
) -> Iterator[Step]:
    """The steps of a run. Leaving the loop ends the run as a user who stops it does: saved, to be resumed."""
    from tidemill.run.loop import StageDone

    ended = False

    def advance() -> Moment | None:
        nonlocal ended
        try:
            return next(moments)
        except StopIteration:
            ended = True
            return None

    try:
        while (first := advance()) is not None:
            number = first.step
            step = Step(number, advance, lambda number=number: read_samples(number))  # type: ignore[misc]
            if isinstance(first, StageDone):
                step.done.append(Stage(first.stage, time.perf_counter() - step._since))
            else:
                step._metrics = first.metrics
            yield step
            if not step.is_done and not ended:
                step.finish()
    finally:
        moments.close()
