"""The run itself: feed, roll out, score, learn, look, save; again. Everything it does is in `train_loop`, in order.
It is a generator: a command takes its moments to the end, a program may do something between them."""

from __future__ import annotations

import gc
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from tidemill.cluster.start.choose import start
from tidemill.device.compiling import announced
from tidemill.flow.adjust import values_of
from tidemill.flow.records import Activity, Evaluation
from tidemill.flow.workers import Rewound, Stopped, Workers
from tidemill.learn import checkpoint
from tidemill.observe.control import Steering
from tidemill.observe.loggers import start as start_loggers
from tidemill.observe.metrics import MetricsWriter
from tidemill.observe.profile import profiled
from tidemill.observe.run_folder import RunFolder, info_of
from tidemill.observe.timeline import recorded
from tidemill.recipe.config import Config
from tidemill.run.interrupt import Presence, Pulse, Stopwatch, interruptions
from tidemill.run.measure import Machine
from tidemill.run.summary import Summary, finish, record, refuse_if_all_failed, restore, save
from tidemill.run.warm_start import warm_start
from tidemill.run.watcher import Watcher


@dataclass(frozen=True, slots=True)
class StageDone:
    """A stage of a step is over; those that work at once are over at once, as `flow.workers.ALL_STAGES`."""

    step: int
    stage: str


@dataclass(frozen=True, slots=True)
class StepDone:
    step: int
    metrics: dict[str, float]


Moment = StageDone | StepDone


def train_loop(
    config: Config, folder: RunFolder, workers: Workers, watch: Watcher, found: checkpoint.Found | None
) -> Generator[Moment, None, Summary]:
    """A run, driven by whoever takes its moments. One who leaves (closes the generator) ends the run as a user who
    stops it does: what is under way is finished and saved."""
    summary, first = Summary(), 0
    if found is not None:
        first = restore(found, workers, summary)
    folder.truncate(
        first if found is not None else -1
    )  # without a checkpoint, what was logged before step 1 is removed, too
    watch.started(workers, first)
    with (
        closing(Machine(config)) as machine,
        recorded(folder.path, "driver", config.observe.timeline) as timeline,
        recording(folder, config, first, watch) as metrics,
        interruptions(watch) as asked,
    ):
        presence = Presence()
        stop = Pulse(lambda: asked() or not presence.is_there or watch.stopping(), workers, watch)
        if summary.is_look_due:  # the user stopped the run during an evaluation
            look(workers, config, summary, metrics, watch, stop)
        if first == 0 and config.eval.before and config.eval.size:
            summary.before = look(workers, config, summary, metrics, watch, stop)
        steering = Steering(
            folder.path,
            first,
            change=workers.adjust,
            actions={
                "save": lambda: save(folder, workers, summary, config, watch),
                "evaluate": lambda: look(workers, config, summary, metrics, watch, stop),
            },
            base=values_of(config),
            is_stopping=stop,
            note=watch.noted,
        )
        for step in range(first + 1, config.train.steps + 1):
            if steering.begin(step):
                summary.is_stopped = True
                break
            watch.beginning(step)
            clock, began = Stopwatch(), time.perf_counter()
            machine.begin()
            try:
                with profiled(folder.path, config.train.profile, step):
                    for stage in workers.stages(step, stop):
                        if presence.is_there:
                            with presence.elsewhere(clock):
                                yield StageDone(step, stage)
            except Stopped:
                summary.is_stopped = True
                break
            if timeline is not None:
                timeline.span("step", began, time.perf_counter(), step=step)
            measured = record(step, folder, workers, metrics, machine, summary, clock.seconds(), watch)
            if presence.is_there:
                with presence.elsewhere(clock):
                    yield StepDone(step, measured)
            if config.eval.size and config.eval.every and step % config.eval.every == 0 and step < config.train.steps:
                seen = look(workers, config, summary, metrics, watch, stop)
                summary.is_look_due = seen is None
                if seen is not None and _reaches_goal(seen, config):
                    summary.is_early, summary.after = True, seen
            is_last = step == config.train.steps or summary.is_early or stop()
            if config.checkpoint.every and step % config.checkpoint.every == 0 and not is_last:
                save(folder, workers, summary, config, watch)
            if is_last:
                summary.is_stopped = stop() and step < config.train.steps and not summary.is_early
                break
        if not summary.is_stopped and summary.after is None and config.eval.after and config.eval.size:
            summary.after = look(workers, config, summary, metrics, watch, stop)
            summary.is_stopped = summary.after is None
    finish(folder, workers, summary, config, watch)
    return summary


def _reaches_goal(seen: Evaluation, config: Config) -> bool:
    accuracy, reward = config.train.stop_at_accuracy, config.train.stop_at_reward
    return (accuracy is not None and seen.accuracy >= accuracy) or (reward is not None and seen.reward >= reward)


def moments(config: Config, folder: RunFolder, watch: Watcher | None = None) -> Generator[Moment, None, Summary]:
    """Train from where the folder's last checkpoint stands to the end of the run."""
    watch = watch or Watcher()
    with announced(lambda what: watch.doing(Activity(what))):
        return (yield from _moments(config, folder, watch))


def _moments(config: Config, folder: RunFolder, watch: Watcher) -> Generator[Moment, None, Summary]:
    watch.doing(Activity("loading the model"))
    workers = start(config, warm_start(config, folder, watch), folder, watch.noted)
    gc.collect()
    gc.freeze()  # what is loaded by now lives to the run's end: the garbage collector need not look through it again
    try:
        workers.keep_definition(folder.path)
        while True:
            found = newest(folder, watch)
            try:
                return (yield from train_loop(config, folder, workers, watch, found))
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


def look(
    workers: Workers, config: Config, summary: Summary, metrics: MetricsWriter, watch: Watcher, stop: Pulse
) -> Evaluation | None:
    """Evaluate. None: the user asked to stop meanwhile, and the loop stops."""
    watch.doing(Activity("evaluating", 0, config.eval.size))
    try:
        evaluation = workers.evaluate(config.eval.size, config.eval.samples, stop.evaluating)
    except Stopped:
        return None
    summary.is_look_due = False
    refuse_if_all_failed(evaluation.failed, evaluation.scored, evaluation.first_failure)
    if evaluation.first_failure:
        watch.noted(f"a reward failed: {evaluation.first_failure}")
    summary.latest = evaluation.accuracy
    metrics.write(summary.steps, evaluation.metrics())
    watch.evaluated(summary.steps, evaluation)
    return evaluation


@contextmanager
def recording(folder: RunFolder, config: Config, first: int, watch: Watcher) -> Iterator[MetricsWriter]:
    about = info_of(folder.path, config, first)
    metrics = MetricsWriter(
        folder, config.observe.tensorboard, first, start_loggers(config.observe.loggers, about, watch.noted)
    )
    metrics.event("start", f"continues from step {first}" if first else "started")
    try:
        yield metrics
        metrics.event("finish", "ended")
    except BaseException as error:
        metrics.event("failure", f"{type(error).__name__}: {error}")
        raise
    finally:
        if trouble := metrics.close():
            watch.noted(trouble)


__all__ = ["Moment", "StageDone", "StepDone", "Summary", "moments"]
