"""`tidemill from`: a recipe from another framework's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.frame import OTHER, app, check_new_file, say


@app.command("from", rich_help_panel=OTHER)
def convert(
    framework: Annotated[str, typer.Argument(help="trl or verl")],
    file: Annotated[Path, typer.Argument(help="YAML, JSON, a launch script (.sh) or a Python script")],
    to: Annotated[Path | None, typer.Option(help="write the recipe here; without it, it is printed")] = None,
) -> None:
    """Turn a TRL or verl config into a recipe. Settings without a counterpart are listed, each with a reason."""
    from tidemill.bridges.recipes.convert import convert as converted

    check_new_file("--to", to)
    made = converted(framework, file)
    if to is None:
        print(made.text, end="")
        return
    to.write_text(made.text, encoding="utf-8")
    counts = f"{len(made.dropped)} settings have no counterpart, {len(made.notes)} things are left to do"
    say(f"{to} was written; {counts} (listed at its end)")
    say(f"next: tidemill config {to} --changed")
