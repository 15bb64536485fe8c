"""Curves: one line of blocks, a small chart in the terminal, a PNG where matplotlib is installed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCKS = "▁▂▃▄▅▆▇█"
# Dots of a braille cell by (column, row); a cell is 2 dots wide and 4 high.
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as one line: means where there are more values than places, gaps where they are not finite."""
    cells = _resample(values, min(width, len(values)))
    low, high = _range(cells)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if c is None else BLOCKS[round((c - low) * scale)] for c in cells)


def terminal_curve(
    values: Sequence[float], width: int = 64, height: int = 10, title: str = "", xlabel: str = ""
) -> str:
    """Draw a chart of `width` by `height` characters, axes included."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return f"{title}: nothing to draw yet" if title else "nothing to draw yet"
    low, high = _range(list(values))
    if high == low:
        low, high = low - 0.5, high + 0.5
    labels = [_tick(value, high - low) for value in (high, (high + low) / 2, low)]
    margin = max(len(label) for label in labels)
    columns, rows = max(4, width - margin - 2), max(2, height - 1 - bool(title))
    canvas = _draw(_resample(values, columns * 2), low, high, rows * 4)
    middle = rows // 2
    lines = [title] if title else []
    for row in range(rows):
        label = {0: labels[0], middle: labels[1], rows - 1: labels[2]}.get(row, "")
        cells = "".join(chr(0x2800 + canvas.get((column, row), 0)) for column in range(columns))
        lines.append(f"{label:>{margin}} {'┤' if label else '│'}{cells}".rstrip("⠀"))
    foot = f"{xlabel} {len(values):,}".strip()
    lines.append(f"{'':>{margin}} └{'1':<{max(1, columns - len(foot))}}{foot}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Line:
    """One run's curve: `points` are (step, value) of every step, `held_out` those of evaluations."""

    name: str
    points: Sequence[tuple[float, float]]
    held_out: Sequence[tuple[float, float]] = ()


def save_png(path: Path, panels: Mapping[str, Sequence[Line]], title: str = "") -> str:
    """Draw one panel per measure, one line per run in each. Returns a sentence for the user; a missing matplotlib is
    not an error."""
    try:
        from matplotlib.figure import Figure  # without pyplot: no window system is needed
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return "no PNG of the curve: matplotlib is not installed (pip install 'tidemill[plot]')"
    figure = Figure(figsize=(7 if len(panels) == 1 else 11, 4), dpi=120, layout="constrained")
    for place, (measure, lines) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(1, len(panels), place)
        for number, line in enumerate(lines):
            _plot(axes, line, f"C{number}")
        axes.set(xlabel="step", ylabel=measure)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if len(lines) > 1 or any(line.held_out for line in lines):
            axes.legend(frameon=False)
    figure.suptitle(title)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        return f"no PNG of the curve: {path} cannot be written ({getattr(error, 'strerror', None) or error})"
    return f"the curve was written to {path}"


def _plot(axes: Any, line: Line, colour: str) -> None:
    """Draw the smoothed line, with the raw one behind it and held-out points on it."""
    xs, ys = [p[0] for p in line.points], [p[1] for p in line.points]
    few = len(xs) <= 12
    if few:
        axes.plot(xs, ys, label=line.name, color=colour, linewidth=1.5, marker="o", markersize=4)
    elif xs:
        axes.plot(xs, ys, color=colour, linewidth=0.8, alpha=0.3)
        axes.plot(xs, smoothed(ys), label=line.name, color=colour, linewidth=1.8)
    if line.held_out:
        axes.plot(
            [p[0] for p in line.held_out],
            [p[1] for p in line.held_out],
            label=f"{line.name}, held out",
            color=colour,
            linestyle="none",
            marker="D",
            markersize=5,
            markerfacecolor="white",
        )


def smoothed(values: Sequence[float], share: float = 0.05) -> list[float]:
    """Average each value with its neighbours, over `share` of the whole line on either side; gaps are skipped."""
    reach = max(1, round(share * len(values)))
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    means = [_mean(window) for window in windows]
    return [math.nan if mean is None else mean for mean in means]


def lines_of(metrics: Sequence[Mapping[str, Any]], name: str) -> dict[str, Line]:
    """Extract a run's curves from its metrics: reward (or loss), and accuracy with held-out points."""
    curves: dict[str, Line] = {}
    main = next((key for key in ("reward", "loss") if any(key in m for m in metrics)), None)
    if main is not None:
        curves[main] = Line(name, _points(metrics, main), _points(metrics, f"eval/{main}"))
    train, held_out = _points(metrics, "accuracy"), _points(metrics, "eval/accuracy")
    if train or held_out:
        curves["accuracy"] = Line(name, train, held_out)
    return curves


def _points(metrics: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(float(m["step"]), float(m[key])) for m in metrics if m.get(key) is not None]


def _draw(points: Sequence[float | None], low: float, high: float, dots_high: int) -> dict[tuple[int, int], int]:
    """Compute braille cells by (column, row); neighbouring points are joined."""
    canvas: dict[tuple[int, int], int] = {}
    last: int | None = None
    for x, value in enumerate(points):
        if value is None:
            last = None
            continue
        y = round((high - value) / (high - low) * (dots_high - 1))
        for dot in _between(last, y):
            cell = (x // 2, dot // 4)
            canvas[cell] = canvas.get(cell, 0) | DOTS[x % 2][dot % 4]
        last = y
    return canvas


def _between(last: int | None, now: int) -> range:
    if last is None or last == now:
        return range(now, now + 1)
    return range(last + 1, now + 1) if last < now else range(now, last)


def _resample(values: Sequence[float], cells: int) -> list[float | None]:
    """Resample to exactly `cells` values: the mean of each slice, or, with few values, a straight line between them."""
    count = len(values)
    if count == 0 or cells <= 0:
        return []
    if count >= cells:
        slices = [values[i * count // cells : (i + 1) * count // cells] for i in range(cells)]
        return [_mean(s) for s in slices]
    found: list[float | None] = []
    for i in range(cells):
        at = i * (count - 1) / max(1, cells - 1)
        left = min(int(at), count - 1)
        right = min(left + 1, count - 1)
        found.append(_mean([values[left] + (values[right] - values[left]) * (at - left)]))
    return found


def _mean(values: Sequence[float]) -> float | None:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else None


def _range(values: Sequence[float | None]) -> tuple[float, float]:
    finite = [v for v in values if v is not None and math.isfinite(v)]
    return (min(finite), max(finite)) if finite else (0.0, 0.0)


def _tick(value: float, span: float) -> str:
    """Format with as many decimals as distinguish the top from the middle."""
    decimals = max(0, 1 - math.floor(math.log10(span)))
    return f"{value:,.{decimals}f}" if decimals <= 5 and abs(value) < 1e6 else f"{value:.3g}"
