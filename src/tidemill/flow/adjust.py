"""Changing a setting of a run between two steps: every worker that reads it gets another config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tidemill.flow.every_step import EveryStep
from tidemill.flow.learning import LearnWorker
from tidemill.flow.rolling import RolloutWorker
from tidemill.flow.scoring import AdvantageWorker, ScoreWorker
from tidemill.flow.stage import Worker
from tidemill.learn.model import MeshModel
from tidemill.recipe.config import Config

LR, TEMPERATURE, KL = "learn.lr", "rollout.temperature", "algorithm.kl.coef"


def adjusted(config: Config, changes: Mapping[str, float]) -> Config:
    for key, value in changes.items():
        config = _with(config, key.split("."), value)
    return config


def values_of(config: Config) -> dict[str, float]:
    """The settings that can be changed, as they are."""
    return {LR: config.learn.lr, TEMPERATURE: config.rollout.temperature, KL: config.algorithm.kl.coef}


def refusal(config: Config, changes: Mapping[str, float]) -> str:
    """Why a run cannot change these; "" when it can."""
    if KL in changes and config.algorithm.kl.target is not None:
        return "algorithm.kl.target steers the coefficient of this run"
    if KL in changes and not config.algorithm.kl.coef:
        return "the run has no reference model, because algorithm.kl.coef was 0 when it began"
    if KL in changes and not changes[KL]:
        return "0 would leave the reference model without a use: take a small weight"
    return ""


def adjust(workers: Iterable[Worker], changes: Mapping[str, float]) -> None:
    """For the stages of one process."""
    for worker in workers:
        if isinstance(worker, RolloutWorker):
            worker.config = adjusted(worker.config, changes)
            worker.sampling = replace(worker.sampling, temperature=worker.config.rollout.temperature)
        elif isinstance(worker, EveryStep):
            adjust(worker.workers, changes)
        elif isinstance(worker, AdvantageWorker):
            worker.config = adjusted(worker.config, changes)
        elif isinstance(worker, ScoreWorker):
            worker.config = adjusted(worker.config, changes)
            _adjust_model(worker.model, {key: value for key, value in changes.items() if key == TEMPERATURE})
        elif isinstance(worker, LearnWorker):
            worker.config = adjusted(worker.config, changes)
            has_own_rate = worker.name == "learn_values" and worker.config.algorithm.critic.lr is not None
            own = {key: value for key, value in changes.items() if not (key == LR and has_own_rate)}
            _adjust_model(worker.learner, own)


def _adjust_model(model: object, changes: Mapping[str, float]) -> None:
    if isinstance(model, MeshModel):
        model.config = adjusted(model.config, changes)
        model.root.config = adjusted(model.root.config, changes)


def _with(section: Any, path: list[str], value: float) -> Any:
    name, *rest = path
    return section.model_copy(update={name: _with(getattr(section, name), rest, value) if rest else value})
