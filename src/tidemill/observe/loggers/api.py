"""What a logger is, and which there are. A logger's package is only imported where it is used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

Name = Literal["tensorboard", "csv", "wandb", "mlflow", "trackio", "swanlab", "webhook", "prometheus"]
NAMES: tuple[str, ...] = get_args(Name)
TITLES = {"tensorboard": "TensorBoard", "csv": "CSV", "wandb": "W&B", "mlflow": "MLflow"} | {
    "trackio": "Trackio",
    "swanlab": "SwanLab",
    "webhook": "Webhook",
    "prometheus": "Prometheus",
}
EXTRAS = ("wandb", "mlflow", "trackio", "swanlab")  # whose packages come by `pip install 'tidemill[NAME]'`


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a logger is told of the run it logs."""

    name: str
    folder: Path
    first: int = 0  # the step a resumed run goes on from
    settings: Mapping[str, Any] = field(default_factory=dict)  # every one, by its whole key
    project: str = "tidemill"
    webhook: str = ""
    port: int = 0  # of the Prometheus endpoint
    host: str = "127.0.0.1"


class Logger(Protocol):
    """Called from a thread of its own, in which it may block; one that raises is switched off, and the run goes on."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def event(self, kind: str, text: str) -> None:
        """`kind`: start, finish, failure or health."""

    def close(self) -> None: ...


def make(name: str, run: RunInfo) -> Logger:
    module = importlib.import_module(f"tidemill.observe.loggers.{name}_logger")
    made: Logger = module.open_logger(run)
    return made
