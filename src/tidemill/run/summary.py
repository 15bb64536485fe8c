"""A run's summary: updated step by step, kept in its checkpoints and in `summary.json`, reported to the watcher."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tidemill.errors import CheckpointError, RewardError
from tidemill.flow.records import Evaluation, dump_evaluation, load_evaluation
from tidemill.flow.tally import idle
from tidemill.flow.workers import Workers
from tidemill.learn import checkpoint
from tidemill.observe.metrics import MetricsWriter
from tidemill.observe.run_folder import RunFolder
from tidemill.recipe.config import Config
from tidemill.run.measure import Machine
from tidemill.run.watcher import Watcher


@dataclass(slots=True)
class Summary:
    """A run's results so far; `summary.json` holds the same."""

    accuracy_before: float | None = None
    accuracy_after: float | None = None
    steps: int = 0
    seconds: float = 0.0
    tokens_per_s: float = 0.0
    tokens: float = 0.0
    is_stopped: bool = False  # by the user, before the last step
    is_early: bool = False  # by train.stop_at_accuracy
    rewards: list[float] = field(default_factory=list)  # of each step; minus the loss where there are no rewards
    has_rewards: bool = True
    before: Evaluation | None = None
    after: Evaluation | None = None
    bad_rows: int = 0
    is_look_due: bool = False  # the user stopped the run during an evaluation
    is_failure_told: bool = False  # the first reward that failed was shown
    best: float | None = None  # accuracy (or reward, without evaluations) of the best checkpoint so far
    latest: float | None = None  # of the current weights

    def plain(self) -> dict[str, Any]:
        names = ("accuracy_before", "accuracy_after", "steps", "seconds", "tokens_per_s", "tokens", "bad_rows")
        own: dict[str, Any] = {n: getattr(self, n) for n in names}
        for when, evaluation in (("before", self.before), ("after", self.after)):
            if evaluation is not None:
                own[f"pass_at_{when}"] = {str(k): v for k, v in evaluation.pass_at.items()}
        return own | {"is_stopped": self.is_stopped, "is_early": self.is_early}


def record(
    step: int,
    folder: RunFolder,
    workers: Workers,
    metrics: MetricsWriter,
    machine: Machine,
    summary: Summary,
    seconds: float,
    watch: Watcher,
) -> dict[str, float]:
    """What the step came to: counted, checked, written and told."""
    measured = workers.measure()
    watch.published(step, int(measured.get("version", -1)))
    made = (
        "made_tokens" in measured
    )  # learning from the run's own samples: each counts once, however often it is learned from
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
    measured |= machine.measure(workers, measured, seconds, tokens, summary.seconds)
    trouble = workers.after_step(step, measured)
    samples_from = folder.samples_size()
    first_error = workers.write_samples(step)
    watch.sampled(step, lambda: folder.samples_after(samples_from))
    if first_error and not summary.is_failure_told:
        summary.is_failure_told = True
        watch.noted(f"a reward failed: {first_error}")
    train = workers.config.train
    failed = int(measured.get("reward_errors", 0))
    refuse_if_all_failed(failed, train.prompts_per_step * train.samples_per_prompt, first_error)
    metrics.write(step, measured)
    watch.stepped(step, measured)
    for sentence in trouble:
        watch.warned(sentence)
        metrics.event("health", sentence)
    return measured


def refuse_if_all_failed(failed: int, made: int, first: str) -> None:
    """End a run whose every reward fails at once, because it learns nothing, and say why."""
    if made and failed >= made:
        raise RewardError(
            f"every reward failed ({failed} of {made} samples), the first: {first or 'see samples.jsonl'}",
            "fix the reward function; `rewards.on_error` decides only about single failures",
        )


def save(folder: RunFolder, workers: Workers, summary: Summary, config: Config, watch: Watcher) -> bool:
    """Save, and say whether it is on disk. A full disk does not end the run: the last checkpoint stays."""
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
        watch.saved(summary.steps, folder.checkpoints / f"step-{summary.steps:06d}")
    except CheckpointError as error:
        watch.noted(f"{error} (the run continues; earlier checkpoints are untouched)")
        return False
    return True


def finish(folder: RunFolder, workers: Workers, summary: Summary, config: Config, watch: Watcher) -> None:
    for evaluation, name in ((summary.before, "accuracy_before"), (summary.after, "accuracy_after")):
        if evaluation is not None:
            setattr(summary, name, evaluation.accuracy)
    is_saved = save(folder, workers, summary, config, watch)
    folder.write_summary(summary.plain())
    watch.ended(summary)
    if not is_saved:
        raise CheckpointError(
            f"the final checkpoint of {folder.path} could not be saved",
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
