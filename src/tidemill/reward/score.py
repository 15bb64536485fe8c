"""Scorer: the recipe's reward functions over samples, added with their weights, while rollout goes on.

A function that raises, hangs, dies or gives no finite number is named with its sample and counted; what it does to the
run is `rewards.on_error`. Results keep the order of the samples.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from tidemill.device import host
from tidemill.errors import ConfigError, RewardError
from tidemill.recipe.config import Rewards
from tidemill.reward.api import FROM, RewardFunction, Sample, Scored, is_batched
from tidemill.reward.registry import check_args, find, is_quick, runs_here, wants_device
from tidemill.reward.workers.outcome import Outcome, judge, judge_many
from tidemill.reward.workers.pool import Pool, Unit

MOST_WORKERS = 32  # with rewards.workers auto: each takes a second to start and some 100 MB


@dataclass(frozen=True, slots=True)
class Component:
    """One entry of the recipe's rewards. `slot`: its place among the pool's functions, None when it runs here."""

    label: str
    name: str
    args: Mapping[str, Any]
    weight: float
    function: RewardFunction
    slot: int | None
    sources: tuple[str, ...] = ()

    def judges(self, sample: Sample) -> bool:
        return not self.sources or sample.meta.get(FROM) in self.sources


@dataclass(frozen=True, slots=True)
class Failure:
    """A reward function's fault on one sample. `at`: file and line, where it raised."""

    reward: str
    sample: int
    where: str  # the data row's origin
    prompt: str
    fault: str
    message: str
    at: str


@dataclass(frozen=True, slots=True)
class Failures:
    """What went wrong among the samples scored: `failed` of `scored` samples had at least one reward that failed."""

    scored: int = 0
    failed: int = 0
    by_fault: Mapping[str, int] = field(default_factory=dict)
    first: Failure | None = None

    def __add__(self, other: Failures) -> Failures:
        by_fault = Counter(self.by_fault) + Counter(other.by_fault)
        return Failures(self.scored + other.scored, self.failed + other.failed, by_fault, self.first or other.first)


class Scorer:
    """`on_outcome` is told of each function's outcome on each sample, on the thread that judged it. `device`: of the
    run, for rewards that have a model."""

    def __init__(self, rewards: Rewards, on_outcome: Callable[[], None] = lambda: None, device: str = "auto") -> None:
        self.rewards, self.on_outcome = rewards, on_outcome
        self.components = components(rewards, device)
        self.failures = Failures()  # since the start
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "reward")
        slow = [(c.name, c.args) for c in self.components if c.slot is not None]
        self._pool = Pool(slow, workers(rewards), rewards.timeout_s) if slow else None

    @property
    def labels(self) -> list[str]:
        """The names of the functions' own values in `Scored.parts`."""
        return [c.label for c in self.components]

    def submit(self, samples: list[Sample]) -> Future[list[Scored]]:
        """Judge samples in the background."""
        task = ScoringTask(self, samples)
        slow = [
            (i, k, c)
            for k, c in enumerate(self.components)
            if c.slot is not None
            for i, sample in enumerate(samples)
            if c.judges(sample)
        ]
        if self._pool is not None and slow:
            self._pool.submit([Unit(c.slot or 0, samples[i], task.setter(i, k)) for i, k, c in slow])
        self._thread.submit(self._judge_here, task, samples)
        return task.future

    def score(self, samples: list[Sample]) -> list[Scored]:
        """Judge samples and wait."""
        return self.submit(samples).result()

    def _judge_here(self, task: ScoringTask, samples: list[Sample]) -> None:
        for k, component in enumerate(self.components):
            if component.slot is not None:
                continue
            own = [i for i, sample in enumerate(samples) if component.judges(sample)]
            if is_batched(component.function):
                outcomes = judge_many(component.function, [samples[i] for i in own], component.args)
                for i, outcome in zip(own, outcomes):
                    task.set(i, k, outcome)
            else:
                for i in own:
                    task.set(i, k, judge(component.function, samples[i], component.args))
        task.finish_if_complete()

    def combine(self, sample: Sample, outcomes: Sequence[Outcome]) -> Scored:
        """The weighted sum; a component that failed counts as 0."""
        parts: dict[str, float] = {}
        failures = []
        own = [component for component in self.components if component.judges(sample)]
        for component, outcome in zip(own, outcomes):
            parts[component.label] = outcome.value
            parts.update({f"{component.label}.{name}": value for name, value in outcome.parts.items()})
            if outcome.fault:
                failures.append(failure(component, sample, outcome))
        self._count(failures)
        value = sum(c.weight * o.value for c, o in zip(own, outcomes))
        first = outcomes[0]
        correct = first.value > self.rewards.correct_above if first.correct is None else first.correct
        return Scored(value, parts, correct and not first.fault, failures[0].message if failures else None)

    def _count(self, failures: Sequence[Failure]) -> None:
        faults = Counter(failure.fault for failure in failures)
        found = Failures(1, bool(failures), faults, failures[0] if failures else None)
        with self._lock:
            self.failures = self.failures + found

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class ScoringTask:
    """One call of submit: collects outcomes from several threads and resolves the future once all are there."""

    def __init__(self, scorer: Scorer, samples: list[Sample]) -> None:
        self.scorer, self.samples = scorer, samples
        self.future: Future[list[Scored]] = Future()
        self.outcomes: list[list[Outcome | None]] = [[None] * len(scorer.components) for _ in samples]
        self.missing = sum(component.judges(sample) for component in scorer.components for sample in samples)
        self.lock = threading.Lock()
        self.is_finished = False

    def setter(self, i: int, k: int) -> Any:
        def done(outcome: Outcome) -> None:
            self.set(i, k, outcome)
            self.finish_if_complete()

        return done

    def set(self, i: int, k: int, outcome: Outcome) -> None:
        with self.lock:
            self.outcomes[i][k] = outcome
            self.missing -= 1
            self.scorer.on_outcome()

    def finish_if_complete(self) -> None:
        with self.lock:
            if self.missing or self.is_finished:
                return
            self.is_finished = True
        try:
            scored = [self.scorer.combine(s, [o for o in row if o]) for s, row in zip(self.samples, self.outcomes)]
        except Exception as error:
            self.future.set_exception(error)
            return
        failed = next((s.error for s in scored if s.error), None)
        if failed and self.scorer.rewards.on_error == "fail":
            remedy = "fix the function, or set rewards.on_error to zero or drop to continue without such samples"
            self.future.set_exception(RewardError(failed, remedy))
        else:
            self.future.set_result(scored)


def components(rewards: Rewards, device: str = "auto") -> tuple[Component, ...]:
    """Every function found, its arguments checked; quick ones are tried on an empty sample."""
    made: list[Component] = []
    slots = 0
    for spec in rewards.functions:
        function = find(spec.function)
        check_args(spec.function, function, spec.args)
        quick = is_quick(spec.function)
        if quick:
            tried = judge(function, Sample("", ""), spec.args)
            if tried.fault:
                raise ConfigError(f"rewards: {spec.function!r} cannot work with args {spec.args}: it {tried.why}")
        label = unique(spec.label or spec.function.rpartition(":")[2], {c.label for c in made})
        is_here = runs_here(spec.function, function)
        args = {"device": device, **spec.args} if wants_device(spec.function) else spec.args
        slot = None if is_here else slots
        made.append(Component(label, spec.function, args, spec.weight, function, slot, spec.sources))
        slots += not is_here
    return tuple(made)


def workers(rewards: Rewards) -> int:
    return min(host.cores(), MOST_WORKERS) if rewards.workers == "auto" else rewards.workers


def failure(component: Component, sample: Sample, outcome: Outcome) -> Failure:
    message = f"{sample.called}: reward {component.name!r} {outcome.why}"
    return Failure(component.name, sample.id, sample.where, sample.prompt, outcome.fault, message, outcome.at)


def unique(label: str, taken: set[str]) -> str:
    number = 2
    chosen = label
    while chosen in taken:
        chosen, number = f"{label}_{number}", number + 1
    return chosen
