"""SwanLab, offline unless SWANLAB_MODE says otherwise: `swanlab sync` sends it later."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tidemill.observe.loggers.api import RunInfo


class SwanLab:
    def __init__(self, run: RunInfo) -> None:
        import swanlab

        folder = run.folder / "swanlog"
        folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = swanlab.init(
            project=run.project,
            name=run.name,
            log_dir=str(folder),
            config={key: str(value) for key, value in run.settings.items()},
            mode=os.environ.get("SWANLAB_MODE", "offline"),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def event(self, kind: str, text: str) -> None:
        """It has no place for them."""

    def close(self) -> None:
        self._run.finish()


open_logger = SwanLab
