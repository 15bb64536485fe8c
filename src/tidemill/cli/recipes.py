"""`tidemill recipes` and `config`: what can be run, and every setting of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from tidemill.cli.frame import START, Overrides, app, console, say


@app.command(rich_help_panel=START)
def recipes() -> None:
    """List the recipes that can be run by name; the ones to start with come first."""
    from tidemill import show

    console.print(show.recipes_table())


@app.command(rich_help_panel=START)
def config(
    recipe: Annotated[str | None, typer.Argument(help="a recipe's name or path; without it, the defaults")] = None,
    overrides: Overrides = None,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="print YAML, which is a recipe itself")] = False,
    changed: Annotated[bool, typer.Option("--changed", help="only settings that differ from the defaults")] = False,
) -> None:
    """Show every setting of a recipe: its value, where it came from, and what it does. Also checks the recipe."""
    from tidemill import show
    from tidemill.check import precheck, rules
    from tidemill.recipe import load as recipe_files

    loaded = recipe_files.load(recipe if recipe is not None else {}, overrides or ())
    if as_yaml:
        print(recipe_files.dump(loaded.config), end="")
        return
    if loaded.config.data.fit and loaded.config.model.path is not None:
        from tidemill.run.own import fitted

        loaded = replace(loaded, config=fitted(loaded.config, loaded.sources, say))
    console.print(show.config_table(loaded, changed, console.width))
    if recipe is not None:
        console.print(show.plan_table(loaded.config))
        precheck.check(loaded.config)
        for line in rules.unread(loaded.config):
            say(line)
