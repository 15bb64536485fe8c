"""Metrics and samples of every step: JSON lines that are complete on disk line by line, and TensorBoard events."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from tidemill.errors import TidemillError
from tidemill.observe.loggers.api import RunInfo
from tidemill.observe.loggers.background import Background
from tidemill.observe.loggers.background import close as close_loggers
from tidemill.observe.loggers.background import start as start_loggers

OF_MACHINE = ("time/", "idle/", "seconds/", "machine/", "cost/")  # what starts the names of metrics of its speed
SPEED = frozenset({"tokens_per_s", "memory_gib", "mfu"})


def is_computed(name: str) -> bool:
    """Whether two equal runs have equal values of a metric: not of those that tell how fast a machine was."""
    return not (name.startswith(OF_MACHINE) or name in SPEED or name.endswith("_s"))


class Places(Protocol):
    """The part of a run folder that is written here."""

    @property
    def metrics_file(self) -> Path: ...

    @property
    def tensorboard(self) -> Path: ...


class MetricsWriter:
    def __init__(
        self, run: Places, tensorboard: bool = True, start_step: int = 0, loggers: Sequence[Background] = ()
    ) -> None:
        """`start_step` is the step a resumed run goes on from: TensorBoard hides older events past it."""
        self._metrics = run.metrics_file.open("ab")
        about = RunInfo("", run.tensorboard.parent, start_step)
        self._loggers = [*(start_loggers(["tensorboard"], about) if tensorboard else ()), *loggers]

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        _append(self._metrics, {"step": step, **{k: _number(v) for k, v in metrics.items()}})
        plain = {k: float(v) for k, v in metrics.items()}
        for logger in self._loggers:
            logger.log(step, plain)

    def event(self, kind: str, text: str) -> None:
        """Tell the loggers that take words: start, finish, failure, health."""
        for logger in self._loggers:
            logger.event(kind, text)

    def close(self) -> str | None:
        """A sentence for the user when a logger could not write everything."""
        self._metrics.close()
        return close_loggers(self._loggers) or None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _append(file: BinaryIO, record: Mapping[str, Any]) -> None:
    """One write, one line: a kill leaves at most the last line cut short."""
    try:
        file.write(json.dumps(record, ensure_ascii=False, default=str).encode() + b"\n")
        file.flush()
    except OSError as error:
        remedy = "free some space and `tidemill resume` the run; a line cut short is dropped then"
        raise TidemillError(f"{file.name} cannot be written: {error.strerror or error}", remedy) from error


def _number(value: float) -> float | int | None:
    """JSON has no NaN or infinity: they are written as null."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
