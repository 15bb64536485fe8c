"""`tidemill diff`: where two runs begin to differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.frame import app


@app.command()
def diff(
    one: Annotated[Path, typer.Argument(help="a run's folder")],
    other: Annotated[Path, typer.Argument(help="another run's folder")],
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """Name the first step, stage and tensor in which two runs differ (observe.dump=[steps] keeps what it compares)."""
    import json

    from tidemill.run import diff as differences

    found = differences.compare(one, other)
    print(json.dumps(found.as_dict()) if as_json else differences.render(found))
    if found.first is not None:
        raise typer.Exit(1)
