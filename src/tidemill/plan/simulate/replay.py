"""Replay a run: the real control code in virtual time, on workers that take what the run's own workers took.

Needs a run with `observe.timeline=work` and with its samples kept. Where a piece of work takes as long as its amount
asks for, the traces say how long; who does it and when is decided anew, by the code that decided in the run.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.errors import ConfigError
from tidemill.observe import timeline
from tidemill.observe.run_folder import RunFolder
from tidemill.observe.timeline import Span
from tidemill.plan import hardware
from tidemill.plan.lengths import Lengths, lines_of
from tidemill.plan.simulate.run import Simulation, simulate
from tidemill.plan.time_model import Overheads, TimeModel
from tidemill.recipe.config import Config

WARM = 2  # steps that come first: what is done once is done there, and they are not compared
NEAR_S = 0.05  # between two steps of an engine with work: what its worker does between them


@dataclass(frozen=True, slots=True)
class Replay:
    simulation: Simulation
    measured: tuple[float, ...]  # seconds of each step of the run

    @property
    def error(self) -> float:
        """Compare the seconds of all steps but the first few: simulated over measured, minus one."""
        found = [s.seconds for s in self.simulation.steps]
        return sum(found[WARM:]) / sum(self.measured[WARM : len(found)]) - 1


class Traces:
    """What a run's workers took, by kind of work."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.steps = [s for s in spans if s.worker == "driver" and s.what == "step"]
        begin = self.steps[WARM].start if len(self.steps) > WARM else 0.0
        self.by_what: dict[str, list[Span]] = defaultdict(list)
        for s in spans:
            if s.worker != "driver" and s.start >= begin:
                self.by_what[s.what].append(s)

    def mean(self, what: str, amount: str = "") -> float:
        """Seconds of one span, or of one unit of an amount."""
        own = [s for s in self.by_what[what] if not amount or s.work.get(amount)]
        count = sum(s.work[amount] for s in own) if amount else float(len(own))
        return sum(s.end - s.start for s in own) / count if count else 0.0

    def line(self, what: str, amount: str) -> tuple[float, float]:
        """Seconds as a + b · amount, by least squares, neither below zero."""
        own = [s for s in self.by_what[what] if s.work.get(amount)]
        if not own:
            return 0.0, 0.0
        x = np.array([s.work[amount] for s in own])
        y = np.array([s.end - s.start for s in own])
        if np.ptp(x) < 0.05 * x.mean():
            return 0.0, float(y.sum() / x.sum())
        b, a = np.polyfit(x, y, 1)
        return (float(a), float(b)) if a >= 0 and b >= 0 else (0.0, float(y.sum() / x.sum()))

    def engine_steps(self) -> dict[int, tuple[float, int]]:
        """By sequences at once: the seconds of all engine steps, with what lay between them, and their number."""
        workers: dict[str, list[Span]] = defaultdict(list)
        for s in self.by_what["rollout"]:
            workers[s.worker].append(s)
        found: dict[int, tuple[float, int]] = {}
        for own in workers.values():
            for s, after in itertools.zip_longest(own, own[1:]):
                end = after.start if after is not None and after.start - s.end < NEAR_S else s.end
                rows = round(s.work["rows"] / s.work["steps"])
                spent, count = found.get(rows, (0.0, 0))
                found[rows] = spent + end - s.start, count + round(s.work["steps"])
        return found


class ReplayTime(TimeModel):
    """A model of time made of traces."""

    def __init__(self, config: Config, traces: Traces, tokens: float) -> None:
        """`tokens`: made by all samples of the run."""
        machines = replace(hardware.this_machine(), cores=0)  # traces tell of waiting for cores already
        base = Overheads()
        feed = traces.mean("feed")
        overheads = replace(base, feed_s=feed, row_s=0.0, publish_s=traces.mean("publish"))
        reward = traces.mean("reward", "rows")
        super().__init__(config, machines, overheads=overheads, reward_s=reward)
        engine = traces.engine_steps()
        row_steps = sum(rows * count for rows, (_, count) in engine.items())
        speed = max(1.0, tokens / row_steps) if row_steps else 1.0  # tokens of a row in one engine step
        self._rows = np.array(sorted(engine), float)
        self._each = np.array([engine[int(rows)][0] / engine[int(rows)][1] / speed for rows in self._rows])
        self._learn = traces.line("learn", "tokens")
        self._scores = {what: traces.mean(what, "rows") for what in ("old_logprobs", "reference", "values", "teacher")}
        self._update = traces.mean("learn", "updates")
        self._traces, self._tokens = traces, tokens

    def again(self, config: Config) -> TimeModel:
        return ReplayTime(config, self._traces, self._tokens)

    def step_s(self, rows: int) -> float:
        return float(np.interp(rows, self._rows, self._each)) if len(self._rows) else 0.0

    @property
    def token_read_s(self) -> float:
        return 0.0  # part of the engine's steps

    def prefill_s(self, tokens: float, pairs: float, ends: float) -> float:
        return 0.0

    @property
    def update_s(self) -> float:
        return self._update

    @property
    def publish_s(self) -> float:
        return self.overheads.publish_s

    def batch_s(self, tokens: float, rows: int, trains: bool) -> float | None:
        if not trains:
            return rows * max(self._scores.values())
        return self._learn[0] + self._learn[1] * tokens


class SampleBook:
    """The lengths of a run's own samples, by group."""

    def __init__(self, run: Path, each: int) -> None:
        found: dict[int, dict[int, int]] = defaultdict(dict)
        prompts: dict[int, int] = {}
        for line in lines_of(run / "samples.jsonl"):
            group = int(line["group"])
            found[group][int(line["id"])] = len(line["tokens"])
            prompts[group] = len(str(line["prompt"]))
        if not found or min(len(own) for own in found.values()) < each:
            raise ConfigError(
                f"{run} did not keep all of its samples", "run it with observe.samples_per_step=100000 to replay it"
            )
        self._groups = [[own[id] for id in sorted(own)] for _, own in sorted(found.items())]
        self._prompts = [prompts[group] for group in sorted(prompts)]

    @property
    def tokens(self) -> int:
        return sum(map(sum, self._groups))

    def responses(self, group: int) -> Sequence[int]:
        return self._groups[group % len(self._groups)]

    def prompt(self, group: int) -> int:
        return self._prompts[group % len(self._prompts)]


def replay(run: str | Path, **options: Any) -> Replay:
    """Simulate a run that is over."""
    folder = RunFolder.open(run, exclusive=False)
    config, path = folder.config, folder.path
    if config.cluster.executor == "local":
        raise ConfigError(f"{path} was made by one process", "replay a run of cluster.executor=processes or ray")
    traces = Traces(list(timeline.read(path)))
    if not traces.steps or not any("steps" in s.work for s in traces.by_what["rollout"]):
        raise ConfigError(f"{path} has no timeline of its work", "run it with observe.timeline=work to replay it")
    book = SampleBook(path, config.train.samples_per_prompt)
    model = ReplayTime(config, traces, book.tokens)
    lengths = Lengths(1, 1, config.rollout.max_new_tokens)
    simulation = simulate(model, lengths, steps=len(traces.steps), book=book, **options)
    return Replay(simulation, tuple(s.end - s.start for s in traces.steps))
