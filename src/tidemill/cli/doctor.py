"""`tidemill doctor`: what works on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.cli.frame import Overrides, app, console


@app.command()
def doctor(
    recipe: Annotated[str | None, typer.Option("--recipe", help="also judge whether this recipe fits here")] = None,
    overrides: Overrides = None,
) -> None:
    """Examine this machine: devices, versions, memory, disk; what would work, what would not, and the remedy."""
    from tidemill import doctor as examination
    from tidemill import show
    from tidemill.recipe import load as recipe_files

    findings = examination.examine(recipe_files.load(recipe, overrides or ()) if recipe else None)
    console.print(show.doctor_table(findings))
    if not examination.is_healthy(findings):
        raise typer.Exit(1)
