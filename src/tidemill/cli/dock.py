"""`tidemill dock`: show the sample flow of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.cli.frame import RUNS, Run, app


@app.command(rich_help_panel=RUNS)
def dock(
    run: Run,
    prometheus: Annotated[bool, typer.Option("--prometheus", help="print it in the Prometheus text format")] = False,
) -> None:
    """Show a run's dock: rows per stage, bytes, the oldest row, and which workers wait."""
    from tidemill.dock import view

    state = view.look(run)
    print(view.prometheus(state) if prometheus else view.render(state))
