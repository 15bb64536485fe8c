"""A timeline: who did what, when, one line of JSON a span; and the same as a trace that Perfetto and Chrome open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

FILE = "timeline.jsonl"
MOST = 200_000  # spans kept of a simulation


@dataclass(frozen=True, slots=True)
class Span:
    worker: str
    what: str  # a stage, a command, or the driver's own work
    start: float  # seconds
    end: float


class Timeline:
    def __init__(self, most: int = MOST) -> None:
        self.spans: list[Span] = []
        self.most = most
        self.busy: dict[str, float] = {}  # seconds by worker

    def span(self, worker: str, what: str, start: float, end: float) -> None:
        if end <= start:
            return
        self.busy[worker] = self.busy.get(worker, 0.0) + end - start
        if len(self.spans) < self.most:
            self.spans.append(Span(worker, what, start, end))


def write(file: Path, spans: Iterable[Span], origin: float = 0.0) -> None:
    """`origin`: when, in seconds since the epoch, time 0 was."""
    with file.open("w", encoding="utf-8") as out:
        for s in spans:
            times = {"start": round(origin + s.start, 6), "end": round(origin + s.end, 6)}
            out.write(json.dumps({"worker": s.worker, "what": s.what, **times}) + "\n")


def read(file: Path) -> Iterator[Span]:
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            plain = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed
        if "end" in plain:
            yield Span(str(plain["worker"]), str(plain["what"]), float(plain["start"]), float(plain["end"]))


def as_trace(spans: Iterable[Span]) -> str:
    """Of Chrome's tracing: microseconds, a row a worker."""
    events = []
    for s in spans:
        events.append(
            {"name": s.what, "ph": "X", "ts": s.start * 1e6, "dur": (s.end - s.start) * 1e6, "pid": 0, "tid": s.worker}
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
