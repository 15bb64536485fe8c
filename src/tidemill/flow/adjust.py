"""Changing a setting of a run between two steps: every worker that reads it gets another config."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from tidemill.flow.beside import Beside, EveryStep
from tidemill.flow.learning import LearnWorker
from tidemill.flow.reference import Holder
from tidemill.flow.rolling import RolloutWorker
from tidemill.flow.scoring import AdvantageWorker, ScoreWorker
from tidemill.flow.stage import Worker
from tidemill.recipe.config import Config

LR, TEMPERATURE, KL = "learn.lr", "rollout.temperature", "algorithm.kl.coef"


@runtime_checkable
class Adjustable(Protocol):
    """Workers whose settings can be changed between steps."""

    def adjust(self, changes: Mapping[str, float]) -> str:
        """A sentence where it cannot be done; then nothing has changed."""


def change(workers: object, changes: Mapping[str, float]) -> str:
    if isinstance(workers, Adjustable):
        return workers.adjust(changes)
    return "the settings of workers in other processes cannot be changed while they run"


def adjusted(config: Config, changes: Mapping[str, float]) -> Config:
    for key, value in changes.items():
        config = _with(config, key.split("."), value)
    return config


def adjust(config: Config, stages: Iterable[Worker], changes: Mapping[str, float]) -> str:
    """Implements `Adjustable.adjust` for stages of this process; `config` is the run's."""
    workers = list(_unwrapped(stages))
    learners = [w.learner for w in workers if isinstance(w, LearnWorker)]
    if not all(isinstance(learner, Holder) for learner in learners):
        return "the learner's ranks are processes of their own, whose settings cannot be changed while they run"
    if KL in changes and config.algorithm.kl.target is not None:
        return "algorithm.kl.target steers the coefficient of this run"
    if KL in changes and not any(isinstance(w, ScoreWorker) and w.name == "reference" for w in workers):
        return "the run has no reference model, because algorithm.kl.coef was 0 when it began"
    for worker in workers:
        _adjust(worker, changes)
    return ""


def _adjust(worker: Worker, changes: Mapping[str, float]) -> None:
    if isinstance(worker, RolloutWorker):
        worker.config = adjusted(worker.config, changes)
        worker.sampling = replace(worker.sampling, temperature=worker.config.rollout.temperature)
    elif isinstance(worker, AdvantageWorker | ScoreWorker | LearnWorker):
        worker.config = adjusted(worker.config, changes)
    if isinstance(worker, LearnWorker) and isinstance(worker.learner, Holder):
        has_own_rate = worker.name == "learn_values" and worker.config.algorithm.critic.lr is not None
        own = {key: value for key, value in changes.items() if not (key == LR and has_own_rate)}
        worker.learner.config = adjusted(worker.learner.config, own)


def _unwrapped(stages: Iterable[Worker]) -> Iterator[Worker]:
    for stage in stages:
        if isinstance(stage, Beside):
            yield stage.inner
        elif isinstance(stage, EveryStep):
            yield from stage.workers
        else:
            yield stage


def _with(section: Any, path: list[str], value: float) -> Any:
    name, *rest = path
    return section.model_copy(update={name: _with(getattr(section, name), rest, value) if rest else value})
