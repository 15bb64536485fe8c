"""The worker that learns from a step's samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tidemill.algorithms.shared import registry
from tidemill.algorithms.shared.steps import to_replay
from tidemill.batch import GROUP, ID, LENGTH, Batch, Column
from tidemill.dock import Dock, Lease, Want
from tidemill.flow.adjust import LR, adjust_model, adjusted
from tidemill.flow.schedule import has_fixed_places, may_lag
from tidemill.flow.stages.stage import at_any_time
from tidemill.flow.tally import Tally
from tidemill.learn.api import Learns
from tidemill.learn.values.critic import critic_passes
from tidemill.recipe.config import Config


def distinct_in_rows(column: Column) -> Any:
    """Return how many different values each row has. Versions grow within a sample, so a change is a new one; rows
    where they do not are looked at one by one."""
    if column.offsets is None:
        return np.ones(column.rows, np.int64)
    values, lengths = column.values, column.lengths
    row = np.repeat(np.arange(column.rows), lengths)
    is_inside = row[1:] == row[:-1]
    found = (lengths > 0) + np.bincount(row[1:][is_inside & (values[1:] != values[:-1])], minlength=column.rows)
    for falling in np.unique(row[1:][is_inside & (values[1:] < values[:-1])]).tolist():
        found[falling] = len(np.unique(column[falling]))
    return found


class LearnWorker:
    """Accumulates gradients of the step's groups as they arrive; updates the weights once an update's last group is in.
    A group's update is fixed by its place in the step, not by its arrival, and no weight changes before the step's last
    sample is made, so every schedule computes the same step."""

    waits = False

    def __init__(
        self,
        dock: Dock,
        learner: Learns,
        config: Config,
        tally: Tally,
        name: str = "learn",
        critic: LearnWorker | None = None,
    ) -> None:
        self.dock, self.learner, self.config, self.tally = dock, learner, config, tally
        self.name, self.critic = name, critic  # the critic's own worker, polled before this one
        self.passes = critic_passes(config) if name == "learn_values" else config.train.passes_per_step
        self.replays = registry.of(config).is_replayed
        self.my_turn = at_any_time  # called before the learner works
        self.held: list[Lease] = []
        self.has_begun = False  # a gradient was accumulated that an interruption would lose
        self.begin(0)

    def adjust(self, changes: Mapping[str, float]) -> None:
        """Change the config of the policy or of the critic, which may have a learning rate of its own."""
        self.config = adjusted(self.config, changes)
        has_own_rate = self.name == "learn_values" and self.config.algorithm.critic.lr is not None
        adjust_model(self.learner, {k: v for k, v in changes.items() if not (k == LR and has_own_rate)})

    def begin(self, first_group: int, tag: str | None = None) -> None:
        """Begin a step, whose groups count from `first_group`."""
        self.first_group, self.tag = first_group, tag
        self.version = self.learner.version
        self.accumulated: set[int] = set()
        self.has_begun = False
        self.is_done = False
        self.only_critic = False
        if self.critic is not None:
            self.critic.begin(first_group, tag)
            steps = self.critic.learner.version // (self.config.train.updates_per_step * self.critic.passes)
            self.only_critic = steps < self.config.algorithm.critic.warmup_steps

    def poll(self) -> bool:
        lease = self.dock.take(self.name, Want(groups=4096, tag=self.tag))
        if lease is not None:
            self.held.append(lease)
        if not self.is_done and self.dock.progress(self.name, self.tag).is_all_leased:
            self._finish_step()
            return True
        if lease is None:
            return False
        self._accumulate_ready()
        return True

    def _update_of(self, batch: Batch) -> Any:
        """Return which of the step's updates each row belongs to: by its group's place in the step, or among those
        kept."""
        updates = self.config.train.updates_per_step
        if not has_fixed_places(self.config):
            kept, place = np.unique(batch.values(GROUP), return_inverse=True)
            return place.reshape(-1) * updates // max(1, len(kept))
        return (batch.values(GROUP) - self.first_group) // (self.config.train.prompts_per_step // updates)

    def _accumulate_ready(self) -> None:
        """Accumulate what fills a micro-batch of the first update; the rest waits."""
        if self.only_critic or self.replays:
            return
        if not has_fixed_places(self.config) and self.config.train.updates_per_step > 1:
            return  # which update a group belongs to is known once the last one is in
        ready = Batch.concat([held.batch for held in self.held])
        fresh = ~np.isin(ready.values(GROUP), list(self.accumulated))
        rows = np.flatnonzero((self._update_of(ready) == 0) & fresh)
        if ready.values(LENGTH)[rows].sum() >= self.config.train.tokens_per_microbatch:
            self._accumulate(ready.gather(rows))

    def _accumulate(self, batch: Batch) -> None:
        self.has_begun = True
        batch = self._counted_in(batch)
        self.my_turn()
        with self.tally.time(self.name, tokens=float(batch.values(LENGTH).sum())):
            self.learner.accumulate(batch)
        self.accumulated.update(int(g) for g in np.unique(batch.values(GROUP)))

    def _counted_in(self, batch: Batch) -> Batch:
        """Sort rows by group, whatever order they arrived in, and count them."""
        self.tally.add("learned_tokens", float(batch.values(LENGTH).sum()))
        self.tally.add("learned_samples", float(batch.rows))
        if may_lag(self.config) and "versions" in batch:
            self._count_age(batch)
        return batch.gather(np.lexsort((batch.values(ID), batch.values(GROUP))))

    def _count_age(self, batch: Batch) -> None:
        """Count how many steps the weights that made a token lag behind those that learn from it."""
        train, versions = self.config.train, batch["versions"]
        age = (self.version - versions.values) / (train.updates_per_step * train.passes_per_step)
        self.tally.mean("staleness", float(age.mean()))
        self.tally.update({"staleness_max": float(age.max())})
        self.tally.mean("sample_versions", float(np.mean(distinct_in_rows(versions))))

    def _finish_step(self) -> None:
        if self.held and not self.only_critic:
            self._learn(Batch.concat([held.batch for held in self.held]))
        for held in self.held:
            held.commit()
        self.held = []
        self.is_done = True

    def _drawn(self, whole: Batch | None, rank: int = 0, ranks: int = 1) -> Batch | None:
        """Return what this rank learns from: the step's samples, or, where samples are learned from many times, some of
        all that the dock keeps."""
        rows, seed = to_replay(self.config, self.learner.version, self.first_group, ranks)
        want = Want(rows=rows, sampler="replay", seed=seed, rank=rank, ranks=ranks)
        lease = self.dock.take(self.name, want) if self.replays and rows else None
        if lease is None:
            return None if self.replays else whole
        self.held.append(lease)  # its bytes stay until the update is made
        return lease.batch.merge({GROUP: np.full(lease.batch.rows, self.first_group)})

    def _learn(self, drawn: Batch | None) -> None:
        if (whole := self._drawn(drawn)) is None:
            return
        update_of = self._update_of(whole)
        for _ in range(self.passes):
            for update in range(self.config.train.updates_per_step):
                fresh = ~np.isin(whole.values(GROUP), list(self.accumulated))
                rows = np.flatnonzero((update_of == update) & fresh)
                if len(rows):
                    self._accumulate(whole.gather(rows))
                if self.accumulated:
                    self.my_turn()  # others may have worked since the last gradient
                    with self.tally.time(self.name, updates=1):
                        self.tally.update(self._named(self.learner.update()))
                self.accumulated = set()

    def _named(self, metrics: dict[str, float]) -> dict[str, float]:
        return metrics if self.name == "learn" else {f"critic/{name}": value for name, value in metrics.items()}
