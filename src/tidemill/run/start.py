"""Start a run from a recipe: load and check the config, open the run's folder, then call the loop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.check import precheck
from tidemill.errors import ConfigError, TidemillError
from tidemill.flow.records import Activity
from tidemill.observe.run_folder import RunFolder, has_steps
from tidemill.recipe import load as recipes
from tidemill.recipe.config import Config

if TYPE_CHECKING:
    from tidemill.flow.records import Evaluation
    from tidemill.run.loop import Moment, Summary
    from tidemill.run.watcher import Watcher

    Moments = Generator[Moment, None, Summary]


class NothingLeft(TidemillError):
    """The run has made all its steps already."""


def train(
    recipe: str | Path | Mapping[str, Any] | Config | recipes.LoadedRecipe,
    overrides: Sequence[str] = (),
    watch: Watcher | None = None,
) -> Summary:
    """Run a recipe. A start that fails changes nothing: an older run of the same name stays in its place."""
    from tidemill.run.interrupt import drained

    return drained(begin(recipe, overrides, watch))


def begin(
    recipe: str | Path | Mapping[str, Any] | Config | recipes.LoadedRecipe,
    overrides: Sequence[str] = (),
    watch: Watcher | None = None,
) -> Moments:
    """A run of a recipe, driven by its moments. Nothing is checked and nothing begins before the first is asked for."""
    from tidemill.run.prepare import prepare

    loaded = recipe if isinstance(recipe, recipes.LoadedRecipe) else recipes.load(recipe, overrides)
    if watch is not None:
        watch.doing(Activity("checking settings and data"))
    prepared = prepare(loaded)
    if watch is not None:
        watch.prepared(prepared.config, prepared.lengths)
        for note in prepared.notes:
            watch.noted(note)
    with RunFolder.create(prepared.config, loaded.sources) as folder:
        if folder.moved is not None and watch is not None:
            watch.noted(f"an older run of this name is now {folder.moved}")
        try:
            return (yield from _loop(folder, watch))
        except BaseException:
            if not has_steps(folder.path):
                failed = folder.discard()
                if failed is not None and watch is not None:
                    watch.noted(f"the workers' logs are in {failed}")
            raise


def resume(run: str | Path, watch: Watcher | None = None, overrides: Sequence[str] = ()) -> Summary:
    """Continue a run from its newest checkpoint, with changed settings if any are given."""
    from tidemill.run.interrupt import drained

    return drained(go_on(run, watch, overrides))


def go_on(run: str | Path, watch: Watcher | None = None, overrides: Sequence[str] = ()) -> Moments:
    """`resume`, driven by its moments."""
    with RunFolder.open(run) as folder:
        for change in folder.change(overrides, _last_step(folder), precheck.check) if overrides else ():
            if watch is not None:
                watch.noted(f"changed: {change}")
        refuse_if_finished(folder)
        return (yield from _loop(folder, watch))


def _last_step(folder: RunFolder) -> int:
    return max((int(line["step"]) for line in folder.metrics()), default=0)


def refuse_if_finished(folder: RunFolder) -> None:
    summary = folder.read_summary()
    done = int(summary.get("steps", 0))
    is_done = summary and not summary["is_stopped"] and (summary["is_early"] or done >= folder.config.train.steps)
    if is_done:
        raise NothingLeft(
            f"{folder.path} has nothing left to do: all {done} steps are done"
            if done != 1
            else f"{folder.path} has nothing left to do: its 1 step is done",
            f"for more steps: tidemill resume {folder.path} train.steps={2 * done}",
        )


def _loop(folder: RunFolder, watch: Watcher | None) -> Moments:
    from tidemill.run.loop import moments  # imports torch and transformers: only once the config is valid

    return (yield from moments(folder.config, folder, watch))


def evaluate(
    where: str | Path,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    *,
    samples: int = 1,
    size: int = 0,
    raw: bool = False,
    step: int | None = None,
    best: bool = False,
    tell: Callable[[Activity], None] = lambda activity: None,
) -> Evaluation:
    """Evaluate a run on its own problems, or any model folder on a recipe's. `raw`: not the running mean."""
    from tidemill.cluster.start.local import evaluate_trained
    from tidemill.run.trained import open_trained

    if recipe is None and (Path(where).expanduser() / "config.json").exists():
        raise ConfigError(
            f"{where} is a plain model folder without problems of its own", "tidemill eval FOLDER --recipe RECIPE"
        )
    config = None if recipe is None else recipes.load(recipe, overrides).config
    trained = open_trained(where, raw=raw, step=step, best=best)
    if recipe is None and trained.step is None:
        raise ConfigError(f"{where} has no problems of its own", f"tidemill eval {where} --recipe RECIPE")
    config = config or recipes.load(trained.config, overrides).config
    return evaluate_trained(trained.loaded, config, size=size or config.eval.size, samples=samples, tell=tell)
