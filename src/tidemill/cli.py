"""The command line, one screen of code per command. Heavy imports wait until a command needs them."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tidemill.errors import TidemillError

app = typer.Typer(
    help="Train language models by reinforcement learning, as distributed dataflow.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

Recipe = Annotated[str, typer.Argument(help="a recipe's name (see `tidemill recipes`) or the path of a YAML file")]
Overrides = Annotated[list[str] | None, typer.Argument(help="settings over the recipe's: key.sub=value …")]
Run = Annotated[Path, typer.Argument(help="a run's folder, for example runs/quickstart")]


@app.command()
def train(recipe: Recipe, overrides: Overrides = None) -> None:
    """Run a recipe: a model learns by the recipe's algorithm. Everything it makes lands in runs/NAME."""
    from tidemill import launch, show
    from tidemill import recipe as recipes

    loaded = recipes.load(recipe, overrides or ())
    watch = show.RunWatcher(console, loaded.config)
    with watch:
        summary = launch.train(loaded.config, watch=watch)
    show.ending(console, loaded.config, watch.folder, summary)


@app.command()
def sft(recipe: Recipe = "quickstart-sft", overrides: Overrides = None) -> None:
    """Fine-tune on prompts with given responses (a recipe whose algorithm is sft)."""
    train(recipe, [*(overrides or []), "algorithm.name=sft"])


@app.command()
def resume(run: Run) -> None:
    """Go on with a run that was stopped or killed, from its last good checkpoint."""
    from tidemill import launch, show
    from tidemill import recipe as recipes
    from tidemill.run import RunFolder

    config = recipes.load(RunFolder.open(run).config_file).config
    watch = show.RunWatcher(console, config)
    with watch:
        summary = launch.resume(run, watch=watch)
    show.ending(console, config, watch.folder, summary)


def main() -> None:
    """Errors a user can mend are a few lines; anything else keeps its traceback, because it is our mistake."""
    try:
        app(standalone_mode=False)
    except typer.Exit as leave:
        sys.exit(leave.exit_code)
    except Exception as error:
        sys.exit(explain(error))


def explain(error: BaseException) -> int:
    import click

    if isinstance(error, click.exceptions.Abort | KeyboardInterrupt):
        errors.print("stopped")
        return 130
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, TidemillError):
        errors.print(f"[red]error:[/] {error.message}", soft_wrap=True)
        if error.remedy:
            errors.print(f"  → {error.remedy}", soft_wrap=True)
        return 1
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        errors.print(
            f"[red]error:[/] the disk is full ({error.filename or 'while writing'})\n  → free some space, then resume"
        )
        return 1
    raise error
