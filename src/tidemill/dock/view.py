"""Shows a dock's state as a small table, and in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tidemill.dock.api import DockState

_UNITS = ("B", "kB", "MB", "GB", "TB")


def render(state: DockState) -> str:
    """Render the output of `tidemill dock RUN`: who waits for what, and where the bytes are."""
    lines = [
        f"rows {state.rows:,}   bytes {in_units(state.bytes)}   weight version {state.version}",
        f"ended {state.ended:,}   dropped {state.dropped:,}   too old {state.stale:,}   "
        f"leases expired {state.expired:,}   reissued {state.reissued:,}   "
        f"lost {state.lost:,}   refused {state.refused:,}",
    ]
    if state.puts_waiting or state.put_wait_s:
        lines.append(f"producers waiting {state.puts_waiting}, {state.put_wait_s:.1f} s in all: full")
    header: tuple[str, ...] = ("stage", "ready", "leased", "done", "oldest", "waiting")
    rows: list[tuple[str, ...]] = []
    for name, c in state.stages.items():
        oldest = f"{c.oldest_s:.1f} s" if c.ready else "-"
        rows.append((name, f"{c.ready:,}", f"{c.leased:,}", f"{c.done:,}", oldest, str(c.waiting)))
    lines += ["", *table(header, rows)]
    if state.warehouses:
        shown = ("used_bytes", "busy_bytes", "spilled_bytes", "pulled_bytes", "sent_bytes")
        header = ("warehouse", "memory", "in use", "on disk", "pulled", "sent")
        rows = [(n, *(in_units(f.get(key, 0)) for key in shown)) for n, f in sorted(state.warehouses.items())]
        lines += ["", *table(header, rows)]
    return "\n".join(lines)


def prometheus(state: DockState, prefix: str = "tidemill_dock") -> str:
    """Render metrics in Prometheus' text format."""
    lines: list[str] = []

    def metric(name: str, kind: str, text: str, values: Iterable[tuple[str, float]]) -> None:
        lines.extend((f"# HELP {prefix}_{name} {text}", f"# TYPE {prefix}_{name} {kind}"))
        lines.extend(f"{prefix}_{name}{labels} {value}" for labels, value in values)

    metric("rows", "gauge", "Rows in the dock.", [("", state.rows)])
    metric("bytes", "gauge", "Bytes that rows in the dock need.", [("", state.bytes)])
    metric("version", "gauge", "Weight version that staleness is measured against.", [("", state.version)])
    metric("puts_waiting", "gauge", "Producers held back because the dock is full.", [("", state.puts_waiting)])
    metric("put_wait_seconds_total", "counter", "Time that producers were held back.", [("", state.put_wait_s)])
    for name, value, text in (
        ("ended", state.ended, "Rows that left the dock."),
        ("dropped", state.dropped, "Rows ended before the last stage."),
        ("stale", state.stale, "Rows found too old."),
        ("leases_expired", state.expired, "Leases that expired or whose holder died."),
        ("leases_reissued", state.reissued, "Second leases on rows that another held far longer than usual."),
        ("lost", state.lost, "Rows whose bytes went with a warehouse."),
        ("refused", state.refused, "Connections and messages that were refused."),
    ):
        metric(f"{name}_total", "counter", text, [("", value)])
    metric("tag_rows", "gauge", "Rows by tag.", [(f'{{tag="{_escaped(tag)}"}}', n) for tag, n in state.tags.items()])
    stages = [(f'{{stage="{_escaped(name)}"}}', c) for name, c in state.stages.items()]
    metric("stage_ready", "gauge", "Rows ready for the stage.", [(label, c.ready) for label, c in stages])
    metric("stage_leased", "gauge", "Rows the stage works on.", [(label, c.leased) for label, c in stages])
    metric("stage_done_total", "counter", "Rows the stage has consumed.", [(label, c.done) for label, c in stages])
    metric("stage_waiting", "gauge", "Takes parked for the stage.", [(label, c.waiting) for label, c in stages])
    metric("stage_oldest_seconds", "gauge", "Age of the first ready row.", [(label, c.oldest_s) for label, c in stages])
    for figure in sorted({name for figures in state.warehouses.values() for name in figures}):
        values = [(f'{{node="{_escaped(n)}"}}', f[figure]) for n, f in state.warehouses.items() if figure in f]
        metric(f"warehouse_{figure}", "gauge", f"The node's warehouse: {figure.replace('_', ' ')}.", values)
    return "\n".join(lines) + "\n"


def look(run: str | Path) -> DockState:
    """Ask the ledger of a run's dock for its state."""
    from tidemill.dock.client import connect

    dock = connect(run)
    try:
        return dock.state()
    finally:
        dock.close()


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows)]
    lines = []
    for row in (header, *rows):
        first, *rest = (cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        lines.append("  ".join((first, *rest)).rstrip())
    return lines


def in_units(nbytes: float) -> str:
    for unit in _UNITS:
        if nbytes < 1000 or unit == _UNITS[-1]:
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
