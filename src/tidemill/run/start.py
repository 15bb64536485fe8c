"""From a recipe to a run: load and check the config, open the run's folder, then hand over to the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.errors import ConfigError, TidemillError
from tidemill.recipe import load as recipes
from tidemill.recipe.config import Config
from tidemill.run.folder import RunFolder

if TYPE_CHECKING:
    from tidemill.flow.records import Evaluation
    from tidemill.run.loop import Summary, Watcher


class NothingLeft(TidemillError):
    """The run has already made all its steps."""


def train(
    recipe: str | Path | Mapping[str, Any] | Config | recipes.LoadedRecipe,
    overrides: Sequence[str] = (),
    watch: Watcher | None = None,
) -> Summary:
    loaded = recipe if isinstance(recipe, recipes.LoadedRecipe) else recipes.load(recipe, overrides)
    recipes.check(loaded.config, fetch=True)
    with RunFolder.create(loaded.config, loaded.sources) as folder:
        if folder.moved is not None and watch is not None:
            watch.noted(f"an older run of this name is now {folder.moved}")
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
    from tidemill.run.loop import run  # brings torch and transformers: only once the config stands

    return run(folder.config, folder, watch)


def evaluate(
    where: str | Path,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    *,
    samples: int = 1,
    size: int = 0,
    raw: bool = False,
) -> Evaluation:
    """Measure a run with its own problems, or any model folder with a recipe's. `raw`: not the running mean."""
    from tidemill.cluster.start.local import evaluate_trained
    from tidemill.run.trained import open_trained

    trained = open_trained(where, raw=raw)
    if recipe is None and trained.step is None:
        raise ConfigError(f"{where} is a plain model folder: which problems?", "tidemill eval FOLDER --recipe RECIPE")
    config = recipes.load(recipe if recipe is not None else trained.config, overrides).config
    return evaluate_trained(trained.loaded, config, size=size or config.eval.size, samples=samples)
