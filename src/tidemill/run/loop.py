"""The run itself: feed, roll out, score, learn, look, save; again. Everything it does is in `train_loop`, in order."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tidemill.cluster.start.choose import start
from tidemill.data.survey import Lengths
from tidemill.errors import CheckpointError, RewardError, TidemillError
from tidemill.flow.adjust import change
from tidemill.flow.records import Activity, Evaluation, dump_evaluation, load_evaluation
from tidemill.flow.tally import idle
from tidemill.flow.workers import Rewound, Stopped, Workers
from tidemill.learn import checkpoint
from tidemill.observe.control import Steering
from tidemill.observe.loggers import start as start_loggers
from tidemill.observe.metrics import MetricsWriter
from tidemill.observe.profile import profiled
from tidemill.observe.run_folder import RunFolder, info_of
from tidemill.recipe.config import Config
from tidemill.run.measure import Machine
from tidemill.run.warm_start import warm_start

TELL_EVERY_S = 0.2  # what the run is at: as often as a panel can show


@dataclass(slots=True)
class Summary:
    """What a run came to; `summary.json` holds the same."""

    accuracy_before: float | None = None
    accuracy_after: float | None = None
    steps: int = 0
    seconds: float = 0.0
    tokens_per_s: float = 0.0
    tokens: float = 0.0
    is_stopped: bool = False  # by the user, before the last step
    is_early: bool = False  # by train.stop_at_accuracy
    rewards: list[float] = field(default_factory=list)  # of each step; minus the loss, where there are no rewards
    has_rewards: bool = True
    before: Evaluation | None = None
    after: Evaluation | None = None
    bad_rows: int = 0
    is_look_due: bool = False  # an evaluation was left when the user stopped the run
    is_failure_told: bool = False  # the first reward that failed was shown
    best: float | None = None  # accuracy (or reward, without evaluations) of the best checkpoint so far
    latest: float | None = None  # of the weights as they are now

    def plain(self) -> dict[str, Any]:
        names = ("accuracy_before", "accuracy_after", "steps", "seconds", "tokens_per_s", "tokens", "bad_rows")
        own: dict[str, Any] = {n: getattr(self, n) for n in names}
        for when, evaluation in (("before", self.before), ("after", self.after)):
            if evaluation is not None:
                own[f"pass_at_{when}"] = {str(k): v for k, v in evaluation.pass_at.items()}
        return own | {"is_stopped": self.is_stopped, "is_early": self.is_early}


class Watcher:
    """What a run tells whoever watches; the command line draws it, tests ignore it."""

    def prepared(self, config: Config, lengths: Lengths) -> None: ...
    def doing(self, activity: Activity) -> None: ...
    def started(self, workers: Workers, first_step: int) -> None: ...
    def evaluated(self, step: int, evaluation: Evaluation) -> None: ...
    def stepped(self, step: int, metrics: dict[str, float]) -> None: ...
    def noted(self, message: str) -> None: ...


def run(config: Config, folder: RunFolder, watch: Watcher | None = None) -> Summary:
    """From wherever the folder stands to the end of the run."""
    watch = watch or Watcher()
    watch.doing(Activity("loading the model"))
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


def train_loop(
    config: Config, folder: RunFolder, workers: Workers, watch: Watcher, found: checkpoint.Found | None
) -> Summary:
    summary, first = Summary(), 0
    if found is not None:
        first = restore(found, workers, summary)
    folder.truncate(first if found is not None else -1)  # without a checkpoint, what was logged before step 1 goes too
    watch.started(workers, first)
    with (
        closing(Machine(config)) as machine,
        recording(folder, config, first, watch) as metrics,
        interruptions(watch) as asked,
    ):
        stop = Pulse(asked, workers, watch)
        if summary.is_look_due:  # the user stopped the run in an evaluation
            look(workers, config, summary, metrics, watch, stop)
        if first == 0 and config.eval.before and config.eval.size:
            summary.before = look(workers, config, summary, metrics, watch, stop)
        steering = Steering(
            folder.path,
            first,
            change=partial(change, workers),
            actions={
                "save": lambda: save(folder, workers, summary, config, watch),
                "evaluate": lambda: look(workers, config, summary, metrics, watch, stop),
            },
            is_stopping=stop,
            note=watch.noted,
        )
        for step in range(first + 1, config.train.steps + 1):
            if steering.begin(step):
                summary.is_stopped = True
                break
            began = time.perf_counter()
            try:
                with profiled(folder.path, config.train.profile, step):
                    workers.step(step, stop)
            except Stopped:
                summary.is_stopped = True
                break
            record(step, workers, metrics, machine, summary, time.perf_counter() - began, watch)
            if config.eval.size and config.eval.every and step % config.eval.every == 0 and step < config.train.steps:
                seen = look(workers, config, summary, metrics, watch, stop)
                summary.is_look_due = seen is None
                if seen is not None and seen.accuracy >= (config.train.stop_at_accuracy or 2.0):
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


class Pulse:
    """Whether the user asked to stop. It is asked all the time, so it also tells the watcher what the run is at."""

    def __init__(self, asked: Callable[[], bool], workers: Workers, watch: Watcher) -> None:
        self.asked, self.workers, self.watch = asked, workers, watch
        self.told_at = 0.0

    def __call__(self) -> bool:
        if self._is_due() and (activity := self.workers.activity()) is not None:
            self.watch.doing(activity)
        return self.asked()

    def evaluating(self, activity: Activity) -> None:
        if self._is_due():
            self.watch.doing(activity)
        if self.asked():
            raise Stopped

    def _is_due(self) -> bool:
        now = time.monotonic()
        if now - self.told_at < TELL_EVERY_S:
            return False
        self.told_at = now
        return True


def look(
    workers: Workers, config: Config, summary: Summary, metrics: MetricsWriter, watch: Watcher, stop: Pulse
) -> Evaluation | None:
    """Evaluate. None: the user asked to stop meanwhile, which the loop then does."""
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


def record(
    step: int,
    workers: Workers,
    metrics: MetricsWriter,
    machine: Machine,
    summary: Summary,
    seconds: float,
    watch: Watcher,
) -> None:
    measured = workers.measure()
    made = "made_tokens" in measured  # learning from one's own samples: each counts once, however often it is learned
    tokens = measured["prompt_tokens"] + measured["made_tokens"] if made else measured.get("learned_tokens", 0.0)
    measured |= {"tokens_per_s": tokens / seconds, "time/step": seconds}
    measured |= idle(measured, seconds)
    summary.steps = step
    summary.seconds += seconds
    summary.tokens += tokens
    summary.tokens_per_s = summary.tokens / summary.seconds
    summary.bad_rows = workers.bad_rows
    summary.has_rewards = "reward" in measured
    summary.rewards.append(measured.get("reward", -measured.get("loss", 0.0)))
    if not workers.config.eval.every:
        summary.latest = summary.rewards[-1]
    measured |= machine.measure(measured, seconds, tokens, workers.parameters, summary.seconds)
    trouble = workers.after_step(step, measured)
    workers.write_samples(step, metrics)
    if metrics.first_error and not summary.is_failure_told:
        summary.is_failure_told = True
        watch.noted(f"a reward failed: {metrics.first_error}")
    train = workers.config.train
    failed = int(measured.get("reward_errors", 0))
    refuse_if_all_failed(failed, train.prompts_per_step * train.samples_per_prompt, metrics.first_error)
    metrics.write(step, measured)
    watch.stepped(step, measured)
    for sentence in trouble:
        watch.noted(sentence)
        metrics.event("health", sentence)


def refuse_if_all_failed(failed: int, made: int, first: str) -> None:
    """A run whose every reward fails learns nothing: it ends at once, and says why."""
    if made and failed >= made:
        raise RewardError(
            f"every reward failed ({failed} of {made} samples), the first: {first or 'see samples.jsonl'}",
            "fix the reward function; `rewards.on_error` only says what single failures do",
        )


def save(folder: RunFolder, workers: Workers, summary: Summary, config: Config, watch: Watcher) -> bool:
    """Whether it is on disk. A full disk does not end a run that can still be mended: the last checkpoint stays."""
    state = {
        "step": summary.steps,
        "summary": summary.plain()
        | {"rewards": summary.rewards, "best": summary.best, "latest": summary.latest}
        | {"has_rewards": summary.has_rewards, "is_look_due": summary.is_look_due},
        "before": None if summary.before is None else dump_evaluation(summary.before),
    }
    metric = summary.latest
    is_best = metric is not None and (summary.best is None or metric >= summary.best)
    try:
        workers.save(folder.checkpoints, summary.steps, state, best=is_best, metric=metric)
        summary.best = metric if is_best else summary.best
    except CheckpointError as error:
        watch.noted(f"{error} (the run goes on; earlier checkpoints are untouched)")
        return False
    return True


def finish(folder: RunFolder, workers: Workers, summary: Summary, config: Config, watch: Watcher) -> None:
    for evaluation, name in ((summary.before, "accuracy_before"), (summary.after, "accuracy_after")):
        if evaluation is not None:
            setattr(summary, name, evaluation.accuracy)
    is_saved = save(folder, workers, summary, config, watch)
    folder.write_summary(summary.plain())
    if not is_saved:
        raise CheckpointError(
            f"the last checkpoint of {folder.path} could not be saved",
            f"free some disk, then: tidemill resume {folder.path}",
        )


def restore(found: checkpoint.Found, workers: Workers, summary: Summary) -> int:
    state = workers.restore(found.path)
    kept = state["summary"]
    summary.steps, summary.seconds, summary.tokens = int(kept["steps"]), kept["seconds"], kept["tokens"]
    summary.rewards, summary.tokens_per_s = list(kept["rewards"]), kept["tokens_per_s"]
    summary.best, summary.latest = kept["best"], kept["latest"]
    summary.has_rewards, summary.is_look_due = kept.get("has_rewards", True), kept.get("is_look_due", False)
    if state["before"] is not None:
        summary.before = load_evaluation(state["before"])
    return int(state["step"])


@contextmanager
def recording(folder: RunFolder, config: Config, first: int, watch: Watcher) -> Iterator[MetricsWriter]:
    about = info_of(folder.path, config, first)
    metrics = MetricsWriter(
        folder, config.observe.tensorboard, first, start_loggers(config.observe.loggers, about, watch.noted)
    )
    metrics.event("start", f"goes on from step {first}" if first else "started")
    try:
        yield metrics
        metrics.event("finish", "ended")
    except BaseException as error:
        metrics.event("failure", f"{type(error).__name__}: {error}")
        raise
    finally:
        if trouble := metrics.close():
            watch.noted(trouble)


@contextmanager
def interruptions(watch: Watcher) -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM end the run at the next safe moment; a second Ctrl-C ends it at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def on_signal(number: int, _: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        watch.noted(f"{signal.Signals(number).name}: stopping and saving; once more to stop at once")

    before = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


__all__ = ["Summary", "TidemillError", "Watcher", "run"]
