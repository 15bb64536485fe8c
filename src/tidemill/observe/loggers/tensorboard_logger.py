"""TensorBoard events in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidemill.observe.loggers.api import RunInfo


class TensorBoard:
    def __init__(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides older events past the step that a resumed run goes on from.
        purge = run.first + 1 if run.first else None
        self._writer: Any = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def event(self, kind: str, text: str) -> None:
        """TensorBoard has no place for them."""

    def close(self) -> None:
        self._writer.close()


open_logger = TensorBoard
