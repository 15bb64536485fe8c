"""Metrics as a table: one row a step, one column a metric, drawn by notebooks and turned into pandas on request."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_ROWS, MOST_COLUMNS = 12, 10  # that a notebook or a terminal shows
FIRST = ("step", "reward", "accuracy", "eval/accuracy", "loss", "response_tokens", "entropy", "kl", "grad_norm", "lr")


class Table:
    """Rows of numbers by name. `table["reward"]` is a column (NaN where a row lacks it), `table[3]` a row."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows: list[dict[str, Any]] = [dict(row) for row in rows]

    @property
    def columns(self) -> list[str]:
        """The names of all metrics: those that most people look for come first."""
        found = list(dict.fromkeys(name for row in self.rows for name in row))
        return sorted(found, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __getitem__(self, which: str | int) -> Any:
        if isinstance(which, int):
            return self.rows[which]
        if which not in self.columns:
            raise KeyError(f"there is no metric {which!r}: there are {', '.join(self.columns[:12])}, …")
        return self.column(which)

    def column(self, name: str) -> npt.NDArray[np.float64]:
        values = [row.get(name) for row in self.rows]
        return np.array([math.nan if value is None else float(value) for value in values])

    def to_pandas(self) -> Any:
        """A pandas DataFrame; pandas is not installed with Tidemill."""
        import pandas

        return pandas.DataFrame(self.rows, columns=self.columns)

    def plot(self, *names: str, width: int = 640, height: int = 220) -> Any:
        """Draw curves inline (by default the reward, or the loss where there are no rewards)."""
        from tidemill.trainer.notebook import Picture, curves

        chosen = names or next(((n,) for n in ("reward", "loss") if n in self.columns), ())
        return Picture(curves({name: self._points(name) for name in chosen}, width, height))

    def _points(self, name: str) -> list[tuple[float, float]]:
        return [(row["step"], row[name]) for row in self.rows if row.get(name) is not None]

    def __repr__(self) -> str:
        shown = self._shown()
        cells = [list(shown), *([_cell(row.get(name)) for name in shown] for row in self._some())]
        widths = [max(len(line[i]) for line in cells) for i in range(len(shown))]
        lines = ["  ".join(text.rjust(width) for text, width in zip(line, widths)) for line in cells]
        return "\n".join([*lines, self._size()])

    def _repr_html_(self) -> str:
        shown = self._shown()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in shown)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(_cell(row.get(name)))}</td>' for name in shown)}</tr>"
            for row in self._some()
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><small>{self._size()}</small>"

    def _shown(self) -> list[str]:
        return self.columns[:MOST_COLUMNS]

    def _some(self) -> list[dict[str, Any]]:
        half = MOST_ROWS // 2
        return self.rows if len(self.rows) <= MOST_ROWS else [*self.rows[:half], *self.rows[-half:]]

    def _size(self) -> str:
        return f"{len(self.rows)} rows × {len(self.columns)} metrics"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
