"""`tidemill plot`: the curves of one or several runs in one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.frame import RUNS, app, say


@app.command(rich_help_panel=RUNS)
def plot(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs")],
    to: Annotated[
        Path | None, typer.Option("--to", help="the PNG to write; without it, RUN/curve.png or curves.png")
    ] = None,
) -> None:
    """Draw the reward (or loss) and accuracy of one or more runs as a PNG."""
    from tidemill import show
    from tidemill.errors import ConfigError
    from tidemill.observe.run_folder import RunFolder

    found = [RunFolder.open(run, exclusive=False).path for run in runs]
    if to is not None and not to.expanduser().absolute().parent.is_dir():
        raise ConfigError(f"--to {to}: there is no folder {to.parent}", "name a file in a folder that exists")
    told = show.plot(found, to or (found[0] / "curve.png" if len(found) == 1 else Path("curves.png")))
    say(told)
    if told.startswith("no PNG"):
        raise typer.Exit(1)
