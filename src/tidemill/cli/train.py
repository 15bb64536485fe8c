"""`tidemill train`, `sft` and `resume`: run a recipe, or continue a run."""

from __future__ import annotations

from pathlib import Path

import typer

from tidemill.cli.frame import INTERRUPTED, RUNS, START, Overrides, Recipe, Run, app, console


@app.command(rich_help_panel=START)
def train(recipe: Recipe, overrides: Overrides = None) -> None:
    """Train a model as the recipe says. Everything is written to runs/NAME."""
    from tidemill import show
    from tidemill.recipe import load as recipe_files
    from tidemill.trainer import Trainer

    loaded = recipe_files.load(recipe, overrides or ())
    watch = show.RunWatcher(console, loaded.config)
    summary = Trainer(recipe=loaded, display=watch).train().summary
    show.ending(console, watch.config, watch.folder, summary)
    if summary.is_stopped:
        raise typer.Exit(INTERRUPTED)


@app.command(rich_help_panel=START)
def sft(recipe: Recipe = "quickstart-sft", overrides: Overrides = None) -> None:
    """Fine-tune on given responses, with a recipe whose algorithm is sft."""
    train(recipe, [*(overrides or []), "algorithm.name=sft"])


@app.command(rich_help_panel=RUNS)
def resume(run: Run, overrides: Overrides = None) -> None:
    """Continue a run that was stopped, killed or finished, from its newest good checkpoint.

    Settings can be changed: tidemill resume RUN train.steps=160 learn.lr=1e-6. RUN/changes.jsonl records each change.
    """
    from tidemill import show
    from tidemill.observe.run_folder import RunFolder
    from tidemill.trainer import Trainer

    watch = show.RunWatcher(console, RunFolder.open(run, exclusive=False).config)
    summary = Trainer.from_run(run, overrides=overrides or (), display=watch).train().summary
    folder = RunFolder.open(run, exclusive=False)
    show.ending(console, folder.config, Path(run) if Path(run).is_dir() else folder.path, summary)
    if summary.is_stopped:
        raise typer.Exit(INTERRUPTED)
