"""Simulate a run: the driver's own steps in virtual time, and what became of the time."""

from __future__ import annotations

import contextlib
import gc
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tidemill.cluster.driver.driver import Driver
from tidemill.cluster.wiring import wire
from tidemill.device import RESOURCES
from tidemill.flow.tally import idle
from tidemill.flow.workers import Rewound
from tidemill.plan.lengths import Lengths
from tidemill.plan.simulate.collect import Timeline
from tidemill.plan.simulate.failures import Faults
from tidemill.plan.simulate.parts import Book
from tidemill.plan.simulate.starter import SimulatedStarter, World
from tidemill.plan.time_model import TimeModel
from tidemill.recipe.config import Config

NEVER_S = 1e12  # deadlines that virtual time must not meet: nothing hangs here but what is meant to
COLLECTION = 100_000  # objects made between two looks for garbage


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    step: int
    start: float
    end: float
    tokens: float
    measured: dict[str, float]

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class Simulation:
    model: TimeModel
    steps: list[SimulatedStep] = field(default_factory=list)  # that counted: those made again are here once
    seconds: float = 0.0  # of the whole run
    wasted_s: float = 0.0  # of steps that were made again, and of coming back
    saving_s: float = 0.0
    lost: int = 0  # workers
    rewinds: int = 0
    events: int = 0
    took_s: float = 0.0  # of this machine
    timeline: Timeline = field(default_factory=Timeline)
    notes: list[str] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return sum(s.tokens for s in self.steps) / self.seconds if self.seconds else 0.0

    @property
    def goodput(self) -> float:
        """Share of the time that went into steps that counted."""
        return sum(s.seconds for s in self.steps) / self.seconds if self.seconds else 0.0

    def step_s(self, skip: int = 1) -> float:
        """The median, without the first steps."""
        found = sorted(s.seconds for s in self.steps[skip:] or self.steps)
        return found[len(found) // 2] if found else 0.0

    def mean(self, name: str, skip: int = 1) -> float:
        found = [s.measured[name] for s in self.steps[skip:] or self.steps if name in s.measured]
        return sum(found) / len(found) if found else 0.0


def simulate(
    model: TimeModel,
    lengths: Lengths,
    *,
    steps: int,
    faults: Faults | None = None,
    seed: int = 0,
    save_every: int = 0,
    book: Book | None = None,
    tell: Callable[[SimulatedStep], None] = lambda step: None,
) -> Simulation:
    """`save_every`: steps between checkpoints, which a run with failures goes back to; 0: the recipe's. `book`: the
    lengths of given samples, in place of drawn ones."""
    began = time.perf_counter()
    made = model.again(_without_deadlines(model.config, steps))
    world = World(made, lengths, faults or Faults(), seed, book=book)
    result = Simulation(model, timeline=world.timeline)
    starter = SimulatedStarter(world)
    accelerator = RESOURCES.get(model.machines.sheet.kind)
    wiring = wire(made.config, world.graph, accelerator)
    starter.reserve(wiring)
    with tempfile.TemporaryDirectory() as folder:
        run_folder: Any = SimpleNamespace(path=Path(folder), samples_file=Path(folder) / "samples.jsonl")
        driver = Driver(made.config, None, run_folder, result.notes.append, starter, wiring, world.graph)
        try:
            driver.start()
            began_s = world.kernel.time
            with _rare_collections():
                _Loop(driver, world, result, save_every or made.config.checkpoint.every or 10, tell).run(steps)
        finally:
            driver.close()
    result.seconds = world.kernel.time - began_s
    result.lost, result.events = driver.pool.lost_total, world.kernel.events
    result.took_s = time.perf_counter() - began
    return result


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Keep Python from looking for garbage in the thousands of workers that live as long as the simulation: with
    10,000 devices that took half of the time."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _without_deadlines(config: Config, steps: int) -> Config:
    cluster = config.cluster.model_copy(
        update=dict.fromkeys(("stall_s", "start_s", "collective_s"), NEVER_S) | {"restarts": 10**9}
    )
    train = config.train.model_copy(update={"steps": max(steps, 1)})
    return config.model_copy(update={"cluster": cluster, "train": train})


class _Loop:
    """Of a run, what matters for its time: steps, checkpoints, and going back to them."""

    def __init__(
        self, driver: Driver, world: World, result: Simulation, every: int, tell: Callable[[SimulatedStep], None]
    ) -> None:
        self.driver, self.world, self.result, self.every, self.tell = driver, world, result, every, tell
        self.can_fail = world.faults.mtbf_hours > 0
        self.saved = 0

    def run(self, steps: int) -> None:
        now = self.world.kernel.now
        self.world.saved[str(self._path(0))] = {"feed": self.driver.feed_state, "version": 0}
        number = 1
        while number <= steps:
            began = now()
            try:
                deque(self.driver.stages(number, lambda: False), maxlen=0)
                self._record(number, began)
                if self.can_fail and number % self.every == 0 and number < steps:
                    self._save(number)  # a learner that is lost meanwhile goes back to the one before
                number += 1
            except Rewound:
                number = self._back(began)

    def _record(self, number: int, began: float) -> None:
        end = self.world.kernel.time
        measured = self.driver.measure()
        measured |= idle(measured, max(1e-9, end - began))
        made = SimulatedStep(number, began, end, measured.get("learned_tokens", 0.0), measured)
        self.result.steps.append(made)
        self.tell(made)

    def _save(self, number: int) -> None:
        began = self.world.kernel.time
        self.driver.save(self._path(number), number, {})
        self.saved = number
        self.result.saving_s += self.world.kernel.time - began

    @staticmethod
    def _path(number: int) -> Path:
        return Path(f"step-{number}").resolve()

    def _back(self, began: float) -> int:
        while True:
            self.result.rewinds += 1
            try:
                self.driver.rewind()
                self.driver.restore(self._path(self.saved))
                break
            except Rewound:
                continue
        kept = [s for s in self.result.steps if s.step <= self.saved]
        again = self.result.steps[len(kept) :]
        self.result.wasted_s += self.world.kernel.time - began + sum(s.seconds for s in again)
        self.result.steps = kept
        return self.saved + 1


def idle_shares(steps: Sequence[SimulatedStep], skip: int = 1) -> dict[str, float]:
    chosen = steps[skip:] or steps
    names = sorted({name for s in chosen for name in s.measured if name.startswith("idle/")})
    return {name: sum(s.measured.get(name, 1.0) for s in chosen) / len(chosen) for name in names}
