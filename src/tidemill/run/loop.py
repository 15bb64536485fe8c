"""The run itself: feed, roll out, score, learn, look, save; again. Everything it does is in `train_loop`, in order."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tidemill.cluster.start.choose import start
from tidemill.flow.records import Evaluation
from tidemill.flow.workers import Rewound, Stopped, Workers
from tidemill.learn import checkpoint
from tidemill.observe.metrics import MetricsWriter
from tidemill.observe.profile import profiled
from tidemill.recipe.config import Config
from tidemill.run.folder import RunFolder
from tidemill.run.interrupt import interruptions
from tidemill.run.summary import Summary, Watcher, finish, record, restore, save


def train_loop(
    config: Config, folder: RunFolder, workers: Workers, watch: Watcher, found: checkpoint.Found | None
) -> Summary:
    summary, first = Summary(), 0
    if found is not None:
        first = restore(found, workers, summary)
    folder.truncate(first if found is not None else -1)  # without a checkpoint, what was logged before step 1 goes too
    watch.started(workers, first)
    with recording(folder, config, first, watch) as metrics, interruptions(watch) as stop:
        if first == 0 and config.eval.before and config.eval.size:
            summary.before = look(workers, config, summary, metrics, watch)
        for step in range(first + 1, config.train.steps + 1):
            began = time.perf_counter()
            try:
                with profiled(folder.path, config.train.profile, step):
                    workers.step(step, stop)
            except Stopped:
                summary.is_stopped = True
                break
            record(step, workers, metrics, summary, time.perf_counter() - began, watch)
            if config.eval.size and config.eval.every and step % config.eval.every == 0 and step < config.train.steps:
                seen = look(workers, config, summary, metrics, watch)
                if seen.accuracy >= (config.train.stop_at_accuracy or 2.0):
                    summary.is_early, summary.after = True, seen
            is_last = step == config.train.steps or summary.is_early or stop()
            if config.checkpoint.every and step % config.checkpoint.every == 0 and not is_last:
                save(folder, workers, summary, config, watch)
            if is_last:
                summary.is_stopped = stop() and step < config.train.steps and not summary.is_early
                break
        if not summary.is_stopped and summary.after is None and config.eval.after and config.eval.size:
            summary.after = look(workers, config, summary, metrics, watch)
    finish(folder, workers, summary, config, watch)
    return summary


def run(config: Config, folder: RunFolder, watch: Watcher | None = None) -> Summary:
    """From wherever the folder stands to the end of the run."""
    watch = watch or Watcher()
    workers = start(config, warm_start(config, folder, watch), folder, watch.noted)
    gc.collect()
    gc.freeze()  # what was loaded by now lives to the run's end: no use in looking through it at every collection
    try:
        workers.keep_definition(folder.path)
        while True:
            found = newest(folder, watch)
            try:
                return train_loop(config, folder, workers, watch, found)
            except Rewound as lost:
                watch.noted(str(lost))
                workers.rewind()
    finally:
        gc.unfreeze()
        workers.close()


def newest(folder: RunFolder, watch: Watcher) -> checkpoint.Found | None:
    found = checkpoint.latest(folder.checkpoints)
    for path, why in found.skipped if found is not None else ():
        assert found is not None
        watch.noted(f"checkpoint {path.name} cannot be used ({why}); going back to {found.path.name}")
    return found


def look(workers: Workers, config: Config, summary: Summary, metrics: MetricsWriter, watch: Watcher) -> Evaluation:
    evaluation = workers.evaluate(config.eval.size, config.eval.samples)
    summary.latest = evaluation.accuracy
    metrics.write(summary.steps, evaluation.metrics())
    watch.evaluated(summary.steps, evaluation)
    return evaluation


def warm_start(config: Config, folder: RunFolder, watch: Watcher) -> Path | None:
    """The model a recipe wants made first: trained once, kept in the run, found again on resume."""
    if config.model.path is not None or config.model.warm_start is None:
        return None
    made = folder.path / "warm_start" / "model"
    if (made / "config.json").exists():
        return made
    from tidemill.recipe import load as recipe

    own = recipe.load(
        config.model.warm_start,
        [f"seed={config.seed}", f"folder={folder.path}", "name=warm_start", f"device={config.device}"]
        + ([f"threads={config.threads}"] if config.threads else []),
    ).config
    watch.noted(f"warm start: {own.about or own.name}")
    recipe.check(own, fetch=True)
    with RunFolder.create(own) as inner, closing(start(own, warm_start(own, inner, watch), inner)) as workers:
        summary = train_loop(own, inner, workers, watch, None)
        if summary.is_stopped:
            raise KeyboardInterrupt
        aside = made.with_name(".model")
        workers.save_model(aside)
        aside.rename(made)
    return made


@contextmanager
def recording(folder: RunFolder, config: Config, first: int, watch: Watcher) -> Iterator[MetricsWriter]:
    metrics = MetricsWriter(folder, config.observe.tensorboard, first)
    try:
        yield metrics
    finally:
        if trouble := metrics.close():
            watch.noted(trouble)


__all__ = ["Summary", "Watcher", "run"]
