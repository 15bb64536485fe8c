"""The command line's frame: the app, the consoles it prints to, arguments that several commands share, and how
errors are shown."""

from __future__ import annotations

import errno
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from tidemill.cli import complete
from tidemill.errors import ConfigError, TidemillError

app = typer.Typer(
    help="Train language models by reinforcement learning, as distributed dataflow.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Markup is off: a value from outside, such as data.source=[a, b], is text. Styles come with `Text`.
console = Console(highlight=False, markup=False)
errors = Console(stderr=True, highlight=False, markup=False)

Recipe = Annotated[
    str,
    typer.Argument(
        help="a recipe's name (see `tidemill recipes`) or the path of a YAML file", autocompletion=complete.recipe
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="settings that replace the recipe's: key.sub=value …", autocompletion=complete.setting),
]
Run = Annotated[Path, typer.Argument(help="a run's folder, for example runs/quickstart", autocompletion=complete.run)]
Where = Annotated[
    Path,
    typer.Argument(
        help="a run's folder, a Hugging Face folder, a known model's name, or org/name", autocompletion=complete.run
    ),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="the weights of the last step instead of their running mean (learn.ema)")
]
Step = Annotated[int | None, typer.Option("--step", help="the checkpoint of this step instead of the newest", min=0)]
Best = Annotated[bool, typer.Option("--best", help="the best checkpoint instead of the newest")]
# What the system says of a path that a user gave, with a remedy. Anything else that it refuses is our bug.
PATH_ERRORS = {
    errno.EISDIR: "name a file",
    errno.ENOTDIR: "name a folder",
    errno.EEXIST: "name another",
    errno.EACCES: "check who may read and write it",
    errno.EPERM: "check who may read and write it",
    errno.EROFS: "name a place that can be written",
    errno.ENAMETOOLONG: "use a shorter name",
}
# The groups of `tidemill --help`, in this order.
START, RUNS, RESULTS, SCALE, OTHER = (
    "Start here",
    "Follow and manage runs",
    "Use a trained model",
    "Larger machines",
    "Other tools",
)
INTERRUPTED = 130  # what shells expect from a command that Ctrl-C ended


def _version(is_asked: bool) -> None:
    if is_asked:
        print(f"tidemill {metadata.version('tidemill')}")
        raise typer.Exit


@app.callback()
def _tidemill(
    version: Annotated[
        bool, typer.Option("--version", help="show the version and exit", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def say(text: str, style: str = "") -> None:
    """Print one sentence as it is: nothing in it is markup."""
    console.print(Text(text, style=style), soft_wrap=True)


def check_new_file(option: str, file: Path | None, may_exist: bool = False) -> None:
    """Refuse a file that cannot be written, before the work whose result goes there."""
    if file is None:
        return
    if file.is_dir():
        raise ConfigError(f"{option} {file}: it is a folder", f"name a file, such as {file / 'new.yaml'}")
    if file.exists() and not may_exist:
        raise ConfigError(f"{option} {file}: it exists", "name a new file")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"{option} {file}: there is no folder {file.parent}", "name a file in a folder that exists")
    if not os.access(file.absolute().parent, os.W_OK):
        raise ConfigError(f"{option} {file}: the folder cannot be written", "name a file in a folder of your own")


def main() -> None:
    """Run the app. Errors that a user can fix are a few lines; anything else keeps its traceback, because it is our
    bug."""
    try:
        status = app(standalone_mode=False, prog_name="tidemill")
    except typer.Exit as leave:
        status = leave.exit_code
    except (Exception, KeyboardInterrupt) as error:
        status = explain(error)
    sys.exit(status)  # a command returns None; where it raised typer.Exit, typer returns the status


def explain(error: BaseException) -> int:
    """Print what a user can do about an error, and return the exit code. A bug of ours is raised again."""
    if isinstance(error, typer.Abort | KeyboardInterrupt):
        errors.print("stopped")
        return INTERRUPTED
    # An unknown command or option. The class depends on typer's version: click's, or that of typer's own copy.
    show = getattr(error, "show", None)
    if callable(show) and isinstance(status := getattr(error, "exit_code", None), int):
        show()
        return status
    if isinstance(error, TidemillError):
        _print_error(error.message, error.remedy)
        return 1
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        _print_error(f"the disk is full ({error.filename or 'while writing'})", "free some space, then resume")
        return 1
    if isinstance(error, OSError) and error.filename is not None and error.errno in PATH_ERRORS:
        _print_error(f"{error.filename}: {error.strerror}", PATH_ERRORS[error.errno])
        return 1
    raise error


def _print_error(message: str, remedy: str) -> None:
    errors.print(Text.assemble(("error:", "red"), " ", message), soft_wrap=True)
    if remedy:
        errors.print(f"  → {remedy}", soft_wrap=True)
