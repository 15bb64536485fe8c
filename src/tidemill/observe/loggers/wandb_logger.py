"""Weights & Biases, offline unless WANDB_MODE says otherwise: `wandb sync` sends it later."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tidemill.observe.loggers.api import RunInfo


class Wandb:
    def __init__(self, run: RunInfo) -> None:
        import wandb

        self._alert = wandb.AlertLevel.WARN
        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            dir=str(run.folder),
            config=dict(run.settings),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def event(self, kind: str, text: str) -> None:
        if kind in ("health", "failure"):
            self._run.alert(title=kind, text=text, level=self._alert)

    def close(self) -> None:
        self._run.finish()


open_logger = Wandb
