"""Curves: one line of blocks, a small chart in the terminal, a PNG where matplotlib is installed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

BLOCKS = "▁▂▃▄▅▆▇█"
# Dots of a braille cell by (column, row); a cell is 2 dots wide and 4 high.
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as one line, means where there are more values than places; what is not finite is a gap."""
    cells = _resample(values, min(width, len(values)))
    low, high = _range(cells)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if c is None else BLOCKS[round((c - low) * scale)] for c in cells)


def terminal_curve(
    values: Sequence[float], width: int = 64, height: int = 10, title: str = "", xlabel: str = ""
) -> str:
    """A chart `width` by `height` characters, axes included."""
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


def save_png(
    path: Path,
    series: Mapping[str, Sequence[tuple[float, float]]],
    title: str = "",
    xlabel: str = "step",
    ylabel: str = "",
) -> str:
    """Draw name → (x, y) points to a file. Gives a sentence for the user; a missing matplotlib is no failure."""
    try:
        from matplotlib.figure import Figure  # without pyplot: no window system is touched
    except ImportError:
        return "no PNG of the curve: matplotlib is not installed (pip install 'tidemill[plot]')"
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for name, points in series.items():
        xs, ys = [p[0] for p in points], [p[1] for p in points]
        axes.plot(xs, ys, label=name, linewidth=1.5, marker="o" if len(xs) <= 12 else None, markersize=4)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(series) > 1:
        axes.legend(frameon=False)
    try:
        figure.savefig(path)
    except OSError as error:
        return f"no PNG of the curve: {path} cannot be written ({error.strerror or error})"
    return f"curve saved as {path}"


def _draw(points: Sequence[float | None], low: float, high: float, dots_high: int) -> dict[tuple[int, int], int]:
    """Braille cells by (column, row); neighbouring points are joined."""
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
    """Exactly `cells` values: the mean of each slice, or, with few values, a straight line between them."""
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
    """With as many decimals as tell the top from the middle."""
    decimals = max(0, 1 - math.floor(math.log10(span)))
    return f"{value:,.{decimals}f}" if decimals <= 5 and abs(value) < 1e6 else f"{value:.3g}"
