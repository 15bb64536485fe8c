"""Trackio, whose database is on this machine: in the run's folder unless TRACKIO_DIR names another place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tidemill.observe.loggers.api import RunInfo


class Trackio:
    def __init__(self, run: RunInfo) -> None:
        os.environ.setdefault("TRACKIO_DIR", str((run.folder / "trackio").resolve()))
        import trackio

        self._run: Any = trackio.init(
            project=run.project,
            name=run.name,
            config={key: str(value) for key, value in run.settings.items()},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def event(self, kind: str, text: str) -> None:
        """Its alerts go to servers; the run's own page has the warnings."""

    def close(self) -> None:
        self._run.finish()


open_logger = Trackio
