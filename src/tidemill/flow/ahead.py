"""How far rollout may run ahead: which steps' rows are in the dock. The rows of step s enter once the weights of step s
- 1 - lead are published. None of their tokens can be older than that, so no sample is ever more than `lead` versions
old when it is learned from, and none is discarded for being slow. With a lead of 0 a step's rows enter when the
previous step is over: rollout then makes exactly the samples of `sync`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tidemill.batch import Batch
from tidemill.dock import Dock
from tidemill.flow.carry import IN_ROLLOUT, TAKEN, prompts_in_rollout
from tidemill.flow.feed import Feed
from tidemill.flow.schedule import schedule_of
from tidemill.flow.workers import Stopped
from tidemill.recipe.config import Config


@dataclass(slots=True)
class OpenStep:
    first_group: int
    groups: int  # prompts put so far, refills included


class Ahead:
    """Puts the rows of steps into the dock, and tracks which steps are under way."""

    def __init__(self, feed: Feed, dock: Dock, config: Config) -> None:
        self.feed, self.dock, self.config = feed, dock, config
        self.lead = schedule_of(config).lead
        self.open: dict[int, OpenStep] = {}
        self.step = 0  # the one that is learned from
        self.starts: dict[int, dict[str, Any]] = {}  # data position before each open step
        self.carries = config.flow.carry_over > 0
        self.under_way: list[list[int]] = []  # with carry-over: group, place in the data, step at which it entered

    def restore(self, state: dict[str, Any]) -> None:
        self.feed.restore(state)
        self.under_way = [list(one) for one in state.get("under_way", ())]

    def state(self) -> dict[str, Any]:
        """Return the data position; with carry-over, also those of the groups that were in rollout when it was."""
        return self.feed.state() | ({"under_way": [list(one) for one in self.under_way]} if self.carries else {})

    def begin(self, step: int) -> OpenStep:
        """Begin to learn from `step`, and put the rows of the steps that may enter now."""
        self.step = step
        if self.carries:
            return self._begin_carrying(step)
        self.open = {s: o for s, o in self.open.items() if s >= step}
        self.starts = {s: at for s, at in self.starts.items() if s >= step}
        for s in range(step, min(step + self.lead, self.config.train.steps) + 1):
            if s not in self.open:
                self.starts[s] = self.feed.state()
                try:
                    rows = self.feed.rows()
                except Stopped:
                    self.feed.restore(self.starts.pop(s))
                    raise
                self.open[s] = OpenStep(int(rows.values("group")[0]), self.config.train.prompts_per_step)
                self.dock.put(rows, self.tag(s) or "")
        return self.open[step]

    def _begin_carrying(self, step: int) -> OpenStep:
        """Put what is unfinished (what the dock has of it stays as it is), and new prompts beside it."""
        if self.under_way:
            groups, places, _ = zip(*self.under_way)
            self.dock.put(self.feed.rows_again(groups, places), IN_ROLLOUT)
        count = prompts_in_rollout(self.config, step) - len(self.under_way)
        if count > 0:
            self._enter(count)
        # the step's number, in place of its first group: its groups need not follow each other
        self.open = {step: OpenStep(step, self.config.train.prompts_per_step)}
        return self.open[step]

    def _enter(self, count: int) -> None:
        first = self.feed.groups
        rows: Batch = self.feed.rows(count)
        self.under_way += [[first + i, place, self.step] for i, place in enumerate(self.feed.places)]
        self.dock.put(rows, IN_ROLLOUT)

    def tag(self, step: int) -> str | None:
        """Return the tag of a step's rows, where several steps share the dock. Tags are reused once a step is over."""
        if self.carries:
            return TAKEN
        return f"step.{step % (self.lead + 1)}" if self.lead else None

    @property
    def tags(self) -> list[str]:
        """Return all tags that are ever used; none without a lead."""
        return [f"step.{i}" for i in range(self.lead + 1)] if self.lead else []

    def refill(self, count: int, tag: str | None = None) -> int:
        """Put new prompts in place of groups without a learning signal, and return how many. They join the step of
        that tag, or the one that is learned from."""
        step = (
            self.step
            if tag is None or self.carries
            else next(s for s in self.open if s >= self.step and self.tag(s) == tag)
        )
        most = self.config.train.prompts_per_step * (1 + self.config.algorithm.dynamic_sampling_rounds)
        now = self.open[step]
        count = min(count, most - now.groups)
        if count > 0:
            self._enter(count) if self.carries else self.dock.put(self.feed.rows(count), self.tag(step) or "")
            now.groups += count
        return max(count, 0)
