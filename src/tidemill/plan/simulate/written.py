"""A simulation as a folder that `tidemill watch` opens like a run: metrics of every step, the timeline, a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidemill.observe import timeline
from tidemill.observe.timeline import Span
from tidemill.plan.simulate.run import Simulation, idle_shares
from tidemill.recipe import load as recipes

PICTURE, TRACE, METRICS, SUMMARY = "simulation.png", "trace.json", "metrics.jsonl", "summary.json"
LANES = 24  # workers drawn
COLOURS = ("#4878cf", "#6acc65", "#d65f5f", "#b47cc7", "#c4ad66", "#77bedb", "#8c613c", "#937860")


def plain(found: Simulation) -> dict[str, Any]:
    """What became of the time, as one object."""
    steps = found.steps
    ages = [s.measured["staleness"] for s in steps if "staleness" in s.measured]
    return {
        "devices": found.model.devices,
        "steps": len(steps),
        "seconds": found.seconds,
        "step_s": found.step_s(),
        "tokens_per_s": found.tokens_per_s,
        "idle": idle_shares(steps),
        "staleness": sum(ages) / len(ages) if ages else 0.0,
        "staleness_max": max((s.measured.get("staleness_max", 0.0) for s in steps), default=0.0),
        "goodput": found.goodput,
        "wasted_s": found.wasted_s,
        "saving_s": found.saving_s,
        "workers_lost": found.lost,
        "rewinds": found.rewinds,
        "events": found.events,
        "took_s": found.took_s,
    }


def write(found: Simulation, folder: Path) -> list[Path]:
    """Give the files that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(recipes.dump(found.model.config), encoding="utf-8")
    lines = []
    for s in found.steps:
        own = {"step": s.step, "time/step": s.seconds, "tokens_per_s": s.tokens / s.seconds if s.seconds else 0.0}
        lines.append(json.dumps(s.measured | own) + "\n")
    (folder / METRICS).write_text("".join(lines), encoding="utf-8")
    (folder / SUMMARY).write_text(json.dumps(plain(found), indent=2) + "\n", encoding="utf-8")
    steps = [Span("driver", "step", s.start, s.end, {"step": s.step}) for s in found.steps]
    spans = [*steps, *found.timeline.spans]
    timeline.write(folder, spans)
    (folder / TRACE).write_text(timeline.as_trace(spans), encoding="utf-8")
    made = [folder / name for name in (METRICS, SUMMARY, timeline.FOLDER, TRACE)]
    if picture(found, folder / PICTURE):
        made.append(folder / PICTURE)
    return made


def picture(found: Simulation, file: Path) -> bool:
    """Draw who did what in the first steps, seconds of every step, idle shares. Without matplotlib nothing is drawn."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, middle, low) = plt.subplots(3, 1, figsize=(11, 9), height_ratios=(4, 2, 2), layout="constrained")
    _draw_lanes(top, found)
    middle.plot([s.step for s in found.steps], [s.seconds for s in found.steps], lw=1)
    middle.set(xlabel="step", ylabel="seconds a step", ylim=(0, None))
    shares = idle_shares(found.steps)
    low.barh([name.removeprefix("idle/") for name in shares], list(shares.values()), color=COLOURS[0])
    low.set(xlabel="share of the time without work", xlim=(0, 1))
    figure.savefig(file, dpi=110)
    plt.close(figure)
    return True


def _draw_lanes(axes: Any, found: Simulation) -> None:
    shown = found.steps[1:4] or found.steps
    begin, end = (shown[0].start, shown[-1].end) if shown else (0.0, 1.0)
    spans = [s for s in found.timeline.spans if s.end > begin and s.start < end]
    workers = _lanes(spans)
    kinds = sorted({s.what for s in spans})
    for number, what in enumerate(kinds):
        own = [s for s in spans if s.what == what and s.worker in workers]
        for worker in workers:
            bars = [(s.start, s.end - s.start) for s in own if s.worker == worker]
            if bars:
                axes.broken_barh(bars, (workers[worker] - 0.4, 0.8), color=COLOURS[number % len(COLOURS)])
        axes.plot([], [], lw=6, color=COLOURS[number % len(COLOURS)], label=what or "other")
    axes.set(yticks=list(workers.values()), yticklabels=list(workers), xlim=(begin, end), xlabel="seconds")
    axes.invert_yaxis()
    axes.legend(loc="upper right", fontsize=8, ncol=4)


def _lanes(spans: Sequence[Span]) -> dict[str, int]:
    """Workers that are drawn, the first of each kind, by their place."""
    names = sorted({s.worker for s in spans}, key=lambda n: (n.rpartition("-")[0], int(n.rpartition("-")[2] or 0)))
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(name.rpartition("-")[0], []).append(name)
    each = max(1, LANES // max(1, len(kinds)))
    return {name: place for place, name in enumerate(n for own in kinds.values() for n in own[:each])}
