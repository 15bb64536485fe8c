"""From a recipe to a run: load and check the config, open the run's folder, then hand over to the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill import recipe as recipes
from tidemill.config import Config
from tidemill.errors import TidemillError
from tidemill.run import RunFolder

if TYPE_CHECKING:
    from tidemill.flow.loop import Summary, Watcher


class NothingLeft(TidemillError):
    """The run has already made all its steps."""


def train(
    recipe: str | Path | Mapping[str, Any] | Config,
    overrides: Sequence[str] = (),
    watch: Watcher | None = None,
) -> Summary:
    loaded = recipes.load(recipe, overrides)
    recipes.check(loaded.config)
    with RunFolder.create(loaded.config, loaded.sources) as folder:
        return _loop(folder, watch)


def resume(run: str | Path, watch: Watcher | None = None) -> Summary:
    with RunFolder.open(run) as folder:
        refuse_if_finished(folder)
        return _loop(folder, watch)


def refuse_if_finished(folder: RunFolder) -> None:
    summary = folder.read_summary()
    if summary and not summary["is_stopped"]:
        raise NothingLeft(
            f"{folder.path} has nothing left to do: all {summary['steps']} steps are made",
            f"to train on: tidemill export {folder.path} --to FOLDER, then a new run with model.path=FOLDER",
        )


def _loop(folder: RunFolder, watch: Watcher | None) -> Summary:
    from tidemill.flow.loop import run  # brings torch and transformers: only once the config stands

    return run(folder.config, folder, watch)
