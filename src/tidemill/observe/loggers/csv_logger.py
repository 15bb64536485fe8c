"""Plain CSV: one row a line of metrics, one column a metric."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

from tidemill.observe.loggers.api import RunInfo

FILE = "metrics.csv"


class Csv:
    """A metric that comes later makes the file be written anew, with another column; it is small and this is rare."""

    def __init__(self, run: RunInfo) -> None:
        self._path: Path = run.folder / FILE
        self._names: list[str] = ["step"]
        if self._path.exists():
            kept = [row for row in self._rows() if int(row["step"]) <= run.first]
            self._names = list(kept[0]) if kept else ["step"]
            self._rewrite(kept)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": str(step)} | {name: _text(value) for name, value in metrics.items()}
        fresh = [name for name in row if name not in self._names]
        if fresh or not self._path.exists():
            kept = self._rows() if self._path.exists() else []
            self._names += fresh
            self._rewrite(kept)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._names).writerow(row)

    def event(self, kind: str, text: str) -> None:
        """A table of numbers has no place for them."""

    def close(self) -> None:
        """Every row is on disk already."""

    def _rows(self) -> list[dict[str, str]]:
        with self._path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        aside = self._path.with_name(f".{FILE}.tmp")
        with aside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._names)
            writer.writeheader()
            writer.writerows(rows)
        aside.replace(self._path)


def _text(value: float) -> str:
    return repr(float(value)) if math.isfinite(value) else ""


open_logger = Csv
