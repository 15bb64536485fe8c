"""`tidemill diff`: where two runs begin to differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.frame import RUNS, app


@app.command(rich_help_panel=RUNS)
def diff(
    one: Annotated[Path, typer.Argument(help="a run's folder")],
    other: Annotated[Path, typer.Argument(help="another run's folder")],
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """Find the first step, stage and tensor in which two runs differ. Both need observe.dump, the steps to compare."""
    import json

    from tidemill.run import diff as differences

    found = differences.compare(one, other)
    print(json.dumps(found.as_dict()) if as_json else differences.render(found))
    if found.first is not None:
        raise typer.Exit(1)
