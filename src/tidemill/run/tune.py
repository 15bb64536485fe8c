"""Measure the best few layouts on this machine: each runs some steps of the recipe, and the fastest wins."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tidemill.errors import ConfigError, TidemillError
from tidemill.observe.run_folder import metrics_of
from tidemill.plan.lengths import Lengths
from tidemill.plan.search import Search, words_of
from tidemill.plan.time_model import TimeModel
from tidemill.recipe import load as recipes
from tidemill.recipe.config import Config


@dataclass(frozen=True, slots=True)
class Tried:
    config: Config
    predicted_s: float
    measured_s: float

    @property
    def words(self) -> str:
        c = self.config
        where = "one process" if c.cluster.executor == "local" else f"{c.cluster.placement.rollout}, "
        own = "" if c.cluster.executor == "local" else f"{words_of(c.learn.parallel)}, {c.cluster.rollouts} engines"
        again = "" if c.learn.recompute == "none" else f", recompute {c.learn.recompute}"
        sizes = f"micro-batch {c.train.tokens_per_microbatch:,}, {c.rollout.concurrent} at once"
        return f"{where}{own}, {c.flow.schedule}, {sizes}{again}"

    def plain(self) -> dict[str, Any]:
        c = self.config
        return {
            "layout": self.words,
            "tokens_per_microbatch": c.train.tokens_per_microbatch,
            "concurrent": c.rollout.concurrent,
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
        }


def tune(
    model: TimeModel, lengths: Lengths, keep: int, steps: int, say: Callable[[str], None] = lambda text: None
) -> list[Tried]:
    """The fastest first. A layout that fails says why and is left out."""
    found = Search(model, lengths).run("throughput", keep)
    if not found.best:
        raise ConfigError(f"no layout fits here: the smallest needs {found.nearest}", "make the recipe smaller")
    tried = []
    for candidate in found.best:
        one = Tried(candidate.config, candidate.step.seconds, 0.0)
        try:
            seconds = measured(candidate.config, steps)
        except TidemillError as error:
            say(f"{one.words}: {error.message}")
            continue
        one = Tried(candidate.config, candidate.step.seconds, seconds)
        say(f"{one.words}: {seconds:.3g} s a step, predicted {one.predicted_s:.3g}")
        tried.append(one)
    if not tried:
        raise ConfigError("none of the layouts ran", "try the recipe as it is with tidemill train")
    return sorted(tried, key=lambda t: t.measured_s)


def measured(config: Config, steps: int) -> float:
    """Seconds of a step, the median after the first."""
    from tidemill.run import start

    with tempfile.TemporaryDirectory() as folder:
        quiet = config.model_copy(
            update={
                "folder": folder,
                "name": "tune",
                "train": config.train.model_copy(update={"steps": steps + 1, "epochs": None}),
                "eval": config.eval.model_copy(update={"before": False, "after": False, "every": 0, "size": 0}),
                "checkpoint": config.checkpoint.model_copy(update={"every": 0}),
                "observe": config.observe.model_copy(
                    update={"tensorboard": False, "loggers": (), "progress": "off", "timeline": "off"}
                ),
            }
        )
        summary = start.train(recipes.load(quiet))
        found = [m["time/step"] for m in metrics_of(Path(folder) / quiet.name)][1:]
    if not found:
        raise TidemillError(f"the run ended after {summary.steps} steps", "give it data for more")
    return float(median(found))
