"""Train a recipe, or go on with its run where one is there: a job that starts twice continues.

The exit status says how it ended: 0 all steps are made, 75 stopped with a checkpoint, 78 the recipe cannot work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tidemill.errors import ConfigError, MissingExtra, TidemillError
from tidemill.recipe import load as recipes
from tidemill.run import start

DONE, STOPPED, REFUSED = 0, 75, 78  # EX_TEMPFAIL and EX_CONFIG of sysexits.h


def run(recipe: str, overrides: Sequence[str] = ()) -> int:
    loaded = recipes.load(recipe, overrides)
    folder = Path(loaded.config.folder).expanduser() / loaded.config.name
    try:
        summary = start.resume(folder) if (folder / "config.yaml").exists() else start.train(loaded)
    except start.NothingLeft:
        return DONE
    return STOPPED if summary.is_stopped else DONE


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tidemill.launch.entry", description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args(words)
    try:
        return run(given.recipe, given.overrides)
    except (ConfigError, MissingExtra) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except TidemillError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
