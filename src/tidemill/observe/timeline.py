"""The timeline of a run: who did what and when, in RUN/timeline, one file a worker, one line of JSON a span.

A line holds `what` (a stage, `publish`, a command, or `step` in the driver's file), `start` and `end` in seconds since
the epoch, and the amounts of work that were counted, such as `tokens`. Lines come in the order in which spans ended.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

FOLDER = "timeline"
GAP_S = 0.005  # between two spans of one stage that are shown as one
LONG_S = 1.0  # a span that lasts longer is written in parts, so that a reader sees it grow
WRITE_S = 1.0  # between two writes, at most


@dataclass(slots=True)
class Span:
    worker: str
    what: str
    start: float  # seconds
    end: float
    work: dict[str, float] = field(default_factory=dict)

    def line(self) -> str:
        work = {name: round(value, 6) for name, value in self.work.items()}
        return json.dumps({"what": self.what, "start": round(self.start, 6), "end": round(self.end, 6), **work}) + "\n"


class Recorder:
    """Writes one worker's spans. Any thread may record. `keeps_all`: each piece of work is a line of its own; else
    pieces of one stage with little time between them are one span, and their amounts are added up."""

    def __init__(self, run: Path, worker: str, keeps_all: bool = False) -> None:
        self.file, self.worker, self.keeps_all = run / FOLDER / f"{worker}.jsonl", worker, keeps_all
        self._lock = threading.Lock()
        self._open: dict[str, Span] = {}  # by what it is of
        self._due: list[str] = []
        self._out: TextIO | None = None
        self._origin = time.time() - time.perf_counter()
        self._written = 0.0

    def span(self, what: str, start: float, end: float, **work: float) -> None:
        """`start`, `end`: of `time.perf_counter`."""
        with self._lock:
            last = self._open.get(what)
            if last is not None and not self.keeps_all and self._continues(last, start):
                last.end = self._origin + end
                for name, value in work.items():
                    last.work[name] = last.work.get(name, 0.0) + value
            else:
                self._close(what)
                self._open[what] = Span(self.worker, what, self._origin + start, self._origin + end, dict(work))
            if end - self._written > WRITE_S:
                self._write(end)

    def _continues(self, last: Span, start: float) -> bool:
        return self._origin + start - last.end < GAP_S and last.end - last.start < LONG_S

    def _close(self, what: str) -> None:
        if what in self._open:
            self._due.append(self._open.pop(what).line())

    def flush(self) -> None:
        with self._lock:
            self._write(time.perf_counter())

    def _write(self, now: float) -> None:
        for what in list(self._open):
            self._close(what)
        self._written = now
        if not self._due:
            return
        try:
            if self._out is None:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                self._out = self.file.open("a", encoding="utf-8")
            self._out.write("".join(self._due))
            self._out.flush()
        except OSError:
            pass  # a full disk must not end a run whose pictures alone would miss something
        self._due.clear()

    def close(self) -> None:
        self.flush()
        with self._lock:
            if self._out is not None:
                self._out.close()
                self._out = None


@contextmanager
def recorded(run: Path, worker: str, kind: str) -> Iterator[Recorder | None]:
    """Give a recorder, if `observe.timeline` wants one, and close it."""
    recorder = recorder_of(run, worker, kind)
    try:
        yield recorder
    finally:
        if recorder is not None:
            recorder.close()


def recorder_of(run: Path, worker: str, kind: str) -> Recorder | None:
    """`kind`: as `observe.timeline` says it."""
    return None if kind == "off" else Recorder(run, worker, keeps_all=kind == "work")


def write(run: Path, spans: Iterable[Span], origin: float = 0.0) -> None:
    """Write spans that are known already. `origin`: when, in seconds since the epoch, their time 0 was."""
    folder = run / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[str]] = {}
    for s in spans:
        lines.setdefault(s.worker, []).append(Span(s.worker, s.what, origin + s.start, origin + s.end, s.work).line())
    for worker, own in lines.items():
        (folder / f"{worker}.jsonl").write_text("".join(own), encoding="utf-8")


def read(run: Path) -> Iterator[Span]:
    """Read the spans of all workers, one worker after the other."""
    for file in sorted((run / FOLDER).glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                plain = json.loads(line)
                span = Span(file.stem, str(plain.pop("what")), float(plain.pop("start")), float(plain.pop("end")))
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # the last line of a run that was killed
            span.work = plain
            yield span


def as_trace(spans: Iterable[Span]) -> str:
    """Convert to Chrome's tracing format: microseconds, a row a worker. Perfetto opens it, too."""
    events = [
        {"name": s.what, "ph": "X", "ts": s.start * 1e6, "dur": (s.end - s.start) * 1e6, "pid": 0, "tid": s.worker}
        for s in spans
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
