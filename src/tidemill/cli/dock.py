"""`tidemill dock`: show the sample flow of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.cli.frame import Run, app


@app.command()
def dock(
    run: Run,
    prometheus: Annotated[bool, typer.Option("--prometheus", help="in Prometheus' text format")] = False,
) -> None:
    """Show the dock that serves a run: rows per stage, bytes, the oldest row, who waits."""
    from tidemill.dock import view

    state = view.look(run)
    print(view.prometheus(state) if prometheus else view.render(state))
