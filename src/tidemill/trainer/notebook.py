"""What a notebook shows of a run: a widget that is drawn anew as the run goes on, and curves as inline pictures.

It is HTML and SVG alone, so that it shows in Jupyter, VS Code and Colab, and stays in the saved notebook.
"""

from __future__ import annotations

import html
import importlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tidemill.observe.progress import clock_text
from tidemill.run.watcher import Watcher

if TYPE_CHECKING:
    from tidemill.data.survey import Lengths
    from tidemill.flow.records import Activity, Evaluation
    from tidemill.flow.workers import Workers
    from tidemill.recipe.config import Config
    from tidemill.run.summary import Summary

DRAW_EVERY_S = 0.25
MOST_POINTS, MOST_NOTES = 400, 6
INKS = ("#2f6fde", "#d9622b", "#1f9d6b", "#8a5cd6", "#c23b80")  # readable on white and on dark notebooks
FACTS = (
    ("reward", "reward", "{:.3f}"),
    ("eval/accuracy", "held-out", "{:.1%}"),
    ("loss", "loss", "{:.4g}"),
    ("response_tokens", "length", "{:.1f}"),
    ("tokens_per_s", "tokens/s", "{:,.0f}"),
)
STYLE = (
    "font:13px/1.5 system-ui,sans-serif;max-width:680px;border:1px solid rgba(128,128,128,.35);"
    "border-radius:8px;padding:10px 14px"
)


def is_notebook() -> bool:
    """Whether output goes to a notebook's cell."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ in ("ZMQInteractiveShell", "Shell")  # Jupyter's, Colab's


def _ipython() -> Any:
    return importlib.import_module("IPython.display")


class Picture:
    """An inline picture; a terminal shows its size alone."""

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def _repr_html_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"a picture of {len(self.svg)} characters of SVG: notebooks draw it"


def curves(lines: Mapping[str, Sequence[tuple[float, float]]], width: int = 640, height: int = 200) -> str:
    """Curves by step as one SVG, each with its name at its last point."""
    known = {name: _thinned(points) for name, points in lines.items() if points}
    if not known:
        return "<small>nothing to draw yet</small>"
    everything = [point for points in known.values() for point in points]
    (low_x, high_x), (low, high) = _span([x for x, _ in everything]), _span([y for _, y in everything])
    left, right, top, bottom = 52, 96, 10, 22
    wide, tall = width - left - right, height - top - bottom

    def at(x: float, y: float) -> str:
        return f"{left + wide * (x - low_x) / (high_x - low_x):.1f},{top + tall * (high - y) / (high - low):.1f}"

    marks = []
    for share in (0.0, 0.5, 1.0):
        y = top + tall * (1 - share)
        line = f'x1="{left}" x2="{left + wide}" y1="{y:.1f}" y2="{y:.1f}"'
        marks.append(f'<line {line} stroke="currentColor" stroke-opacity=".15"/>')
        marks.append(_text(left - 6, y + 4, f"{low + share * (high - low):.3g}", "end"))
    marks += [
        _text(left, height - 5, f"{low_x:g}", "start"),
        _text(left + wide, height - 5, f"step {high_x:g}", "end"),
    ]
    drawn, taken = [], list[float]()
    for (name, points), ink in zip(known.items(), INKS * len(known)):
        path = " ".join(at(x, y) for x, y in points)
        x, y = (float(part) for part in at(*points[-1]).split(","))
        while any(abs(y - other) < 13 for other in taken):
            y += 13
        taken.append(y)
        drawn.append(f'<polyline fill="none" stroke="{ink}" stroke-width="1.8" points="{path}"/>'
                     f'{_text(x + 6, y + 4, name, "start", ink)}')  # fmt: skip
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" style="max-width:100%;height:auto" role="img" '
        f'aria-label="{html.escape(", ".join(known))} by step">{"".join(marks)}{"".join(drawn)}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str, ink: str = "currentColor") -> str:
    fade = "" if ink != "currentColor" else ' fill-opacity=".65"'
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="11" font-family="system-ui,sans-serif" text-anchor="{anchor}" '
        f'fill="{ink}"{fade}>{html.escape(text)}</text>'
    )


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    stride = -(-len(points) // MOST_POINTS)
    return [*points[::stride], points[-1]] if stride > 1 else points


class NotebookWatcher(Watcher):
    """Draws a run into the output of its cell, at most a few times a second."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._step, self._first, self._state, self._doing = 0, 0, "starting", ""
        self._points: dict[str, list[tuple[float, float]]] = {"reward": [], "eval/accuracy": [], "loss": []}
        self._latest: dict[str, float] = {}
        self._notes: list[str] = []
        self._began = self._drawn = time.monotonic()
        self._handle: Any = None

    def __enter__(self) -> NotebookWatcher:
        self._handle = _ipython().display(_ipython().HTML(self.html()), display_id=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, GeneratorExit):
            self._state = "failed"
        elif self._state not in ("finished", "stopped"):
            self._state = "stopped"
        self._draw(is_last=True)

    def prepared(self, config: Config, lengths: Lengths) -> None:
        self.config = config

    def doing(self, activity: Activity) -> None:
        count = f" {activity.done:,} of {activity.total:,}" if activity.total else ""
        self._doing = f"{activity.what}{count}"
        self._draw()

    def started(self, workers: Workers, first_step: int) -> None:
        self._state, self._first, self._step = "running", first_step, first_step
        self._began = time.monotonic()
        self._draw()

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        self._step, self._doing = step, ""
        self._take(step, metrics)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self._take(step, evaluation.metrics())

    def noted(self, message: str) -> None:
        self._notes = [*self._notes, message][-MOST_NOTES:]
        self._draw()

    def ended(self, summary: Summary) -> None:
        self._state = "stopped" if summary.is_stopped else "finished"
        self._draw(is_last=True)

    def of_warm_start(self) -> Watcher:
        return _WarmStart(self)

    def _take(self, step: int, metrics: Mapping[str, float]) -> None:
        self._latest |= metrics
        for name, points in self._points.items():
            if name in metrics and not (name == "loss" and self._points["reward"]):
                points.append((float(step), float(metrics[name])))
        self._draw()

    def _draw(self, is_last: bool = False) -> None:
        now = time.monotonic()
        if self._handle is None or (now - self._drawn < DRAW_EVERY_S and not is_last):
            return
        self._drawn = now
        self._handle.update(_ipython().HTML(self.html()))

    def html(self) -> str:
        total = self.config.train.steps
        share = 100 * self._step / max(1, total)
        facts = "".join(
            f'<span style="margin-right:18px"><b>{form.format(self._latest[key])}</b> {label}</span>'
            for key, label, form in FACTS
            if key in self._latest
        )
        lines = {name: points for name, points in self._points.items() if len(points) > 1}
        lines = {name: points for name, points in lines.items() if name != "loss" or "reward" not in lines}
        notes = "".join(f'<div style="opacity:.75">{html.escape(text)}</div>' for text in self._notes)
        return (
            f'<div class="tidemill-run" style="{STYLE}"><div><b>{html.escape(self.config.name)}</b> '
            f'<span style="opacity:.7">{self._state}{", " + html.escape(self._doing) if self._doing else ""}</span>'
            f'<span style="float:right;opacity:.7">step {self._step} of {total}{self._left()}</span></div>'
            '<div style="height:6px;border-radius:3px;background:rgba(128,128,128,.25);margin:6px 0" '
            f'role="progressbar" aria-valuenow="{self._step}" aria-valuemax="{total}">'
            f'<div style="width:{share:.1f}%;height:100%;border-radius:3px;background:{INKS[0]}"></div></div>'
            f"<div>{facts}</div>{curves(lines) if lines else ''}{notes}</div>"
        )

    def _left(self) -> str:
        made = self._step - self._first
        if self._state != "running" or made <= 0:
            return ""
        return f", {clock_text((time.monotonic() - self._began) / made * (self.config.train.steps - self._step))} left"


class _WarmStart(Watcher):
    """The run that makes the model to start from is one line of the widget."""

    def __init__(self, outer: NotebookWatcher) -> None:
        self.outer, self.total = outer, 0

    def started(self, workers: Workers, first_step: int) -> None:
        self.total = workers.config.train.steps

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        self.outer._doing = f"warm start, step {step} of {self.total}"
        self.outer._draw()

    def noted(self, message: str) -> None:
        self.outer.noted(message)
