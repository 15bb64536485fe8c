"""Metrics and samples of every step: JSON lines that are complete on disk line by line, and TensorBoard events."""

from __future__ import annotations

import json
import math
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from tidemill.errors import TidemillError

TENSORBOARD_CLOSE_S = 30.0


class Places(Protocol):
    """The part of a run folder that is written here."""

    @property
    def metrics_file(self) -> Path: ...

    @property
    def tensorboard(self) -> Path: ...


class MetricsWriter:
    def __init__(self, run: Places, tensorboard: bool = True, start_step: int = 0) -> None:
        """`start_step` is the step a resumed run goes on from: TensorBoard hides older events past it."""
        self._metrics = run.metrics_file.open("ab")
        self._events = EventThread(run.tensorboard, start_step) if tensorboard else None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        _append(self._metrics, {"step": step, **{k: _number(v) for k, v in metrics.items()}})
        if self._events is not None:
            self._events.put(step, {k: float(v) for k, v in metrics.items()})

    def close(self) -> str | None:
        """A sentence for the user when TensorBoard's events could not be written."""
        self._metrics.close()
        return self._events.close() if self._events is not None else None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EventThread:
    """Writes TensorBoard events in the background: loading the writer takes a second that no step should wait for."""

    def __init__(self, folder: Path, start_step: int) -> None:
        self._queue: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, args=(folder, start_step), name="tensorboard", daemon=True)
        self._thread.start()

    def put(self, step: int, metrics: dict[str, float]) -> None:
        self._queue.put((step, metrics))

    def close(self) -> str | None:
        self._queue.put(None)
        self._thread.join(TENSORBOARD_CLOSE_S)
        return self._failure

    def _run(self, folder: Path, start_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter

            with SummaryWriter(str(folder), purge_step=start_step + 1 if start_step else None) as writer:
                while (item := self._queue.get()) is not None:
                    for name, value in item[1].items():
                        writer.add_scalar(name, value, item[0])
                    writer.flush()
        except Exception as error:  # whatever a logger does, training goes on; the user is told at the end
            first = (str(error).splitlines() or [type(error).__name__])[0]
            self._failure = f"TensorBoard events were not all written: {first} (metrics.jsonl has everything)"


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
