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
    recipe: str | Path | Mapping[str, Any] | Config, overrides: Sequence[str] = (), watch: Watcher | None = None
) -> Summary:
    loaded = recipes.load(recipe, overrides)
    recipes.check(loaded.config)
    folder = RunFolder.create(loaded.config, loaded.sources)
    with folder.locked():
        return _loop(loaded.config, folder, watch)


def resume(run: str | Path, watch: Watcher | None = None) -> Summary:
    folder = RunFolder.open(run)
    config = recipes.load(folder.config_file).config
    with folder.locked():
        refuse_if_finished(folder, config)
        return _loop(config, folder, watch)


def refuse_if_finished(folder: RunFolder, config: Config) -> None:
    summary = folder.read_summary()
    if (
        summary
        and not summary.get("is_stopped")
        and (summary.get("is_early") or summary.get("steps", 0) >= config.train.steps)
    ):
        raise NothingLeft(
            f"{folder.path} has nothing left to do: all {summary['steps']} steps are made",
            f"train on with a new run: tidemill train … model.path=EXPORT, after tidemill export {folder.path} --to EXPORT",
        )


def _loop(config: Config, folder: RunFolder, watch: Watcher | None) -> Summary:
    from tidemill.flow.loop import run  # brings torch and transformers: only once the config stands

    return run(config, folder, watch)
