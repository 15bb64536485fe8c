"""`tidemill doctor`: what works on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.cli.frame import START, Overrides, app, console


@app.command(rich_help_panel=START)
def doctor(
    recipe: Annotated[str | None, typer.Option("--recipe", help="also check whether this recipe can run here")] = None,
    overrides: Overrides = None,
) -> None:
    """Check this machine: devices, versions, memory and disk; what works, what does not, and how to fix it."""
    from tidemill import doctor as examination
    from tidemill import show
    from tidemill.recipe import load as recipe_files

    findings = examination.examine(recipe_files.load(recipe, overrides or ()) if recipe else None)
    console.print(show.doctor_table(findings))
    if not examination.is_healthy(findings):
        raise typer.Exit(1)
