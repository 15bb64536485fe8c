"""Changes a setting of a run between two steps: every worker that reads it gets another config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from tidemill.flow.stages.stage import Worker
from tidemill.learn.model import MeshModel
from tidemill.recipe.config import Config

LR, TEMPERATURE, KL = "learn.lr", "rollout.temperature", "algorithm.kl.coef"


def adjusted(config: Config, changes: Mapping[str, float]) -> Config:
    for key, value in changes.items():
        config = _with(config, key.split("."), value)
    return config


def values_of(config: Config) -> dict[str, float]:
    """Return the current values of the settings that can be changed."""
    return {LR: config.learn.lr, TEMPERATURE: config.rollout.temperature, KL: config.algorithm.kl.coef}


def refusal(config: Config, changes: Mapping[str, float]) -> str:
    """Say why a run cannot change these; "" when it can."""
    if KL in changes and config.algorithm.kl.target is not None:
        return "this run adapts the coefficient to algorithm.kl.target"
    if KL in changes and not config.algorithm.kl.coef:
        return "the run has no reference model, because algorithm.kl.coef was 0 when it began"
    if KL in changes and not changes[KL]:
        return "0 would leave the reference model without a use: choose a small weight"
    return ""


@runtime_checkable
class Adjustable(Protocol):
    """A worker that reads settings which can change."""

    def adjust(self, changes: Mapping[str, float]) -> None: ...


def adjust(workers: Iterable[Worker], changes: Mapping[str, float]) -> None:
    """Change the stages of one process; a worker that reads none of these settings is left alone."""
    for worker in workers:
        if isinstance(worker, Adjustable):
            worker.adjust(changes)


def adjust_model(model: object, changes: Mapping[str, float]) -> None:
    if isinstance(model, MeshModel):
        model.config = adjusted(model.config, changes)
        model.root.config = adjusted(model.root.config, changes)


def _with(section: Any, path: list[str], value: float) -> Any:
    name, *rest = path
    return section.model_copy(update={name: _with(getattr(section, name), rest, value) if rest else value})
