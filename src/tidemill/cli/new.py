"""`tidemill new`: a project to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.frame import START, app, say


@app.command(rich_help_panel=START)
def new(
    folder: Annotated[Path, typer.Argument(help="the project's folder; the run gets its name")],
    model: Annotated[
        str | None, typer.Option(help="a model's folder, name or org/name; none: a small one made on the spot")
    ] = None,
) -> None:
    """Write a new project that works as it is: a recipe, a reward, data and tests."""
    from tidemill.scaffold.make import make

    for file in make(folder, model):
        say(f"wrote {file}")
    say(f"try: cd {folder}; tidemill train recipe.yaml")
