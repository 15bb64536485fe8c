"""Workers between rollout and learning: advantages of groups, log-probs of a model, values of a critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.algorithms.api import Algorithm
from tidemill.batch import GROUP, ID, Batch
from tidemill.dock import Counts, Dock, Lease, Want
from tidemill.flow.adjust import TEMPERATURE, adjust_model, adjusted
from tidemill.flow.stages.stage import at_any_time, committed
from tidemill.flow.tally import Tally
from tidemill.learn.api import Scores
from tidemill.models.buffers import carried
from tidemill.recipe.config import Config


class AdvantageWorker:
    """Computes advantages of complete groups, or of the whole step where the algorithm says so; rows without any end
    here."""

    name = "advantage"
    waits = False

    def __init__(
        self, dock: Dock, algorithm: Algorithm, config: Config, tally: Tally, refill: Callable[[int], int] = lambda n: 0
    ) -> None:
        self.dock, self.algorithm, self.config, self.tally, self.refill = dock, algorithm, config, tally, refill
        self.held: list[Lease] = []
        self.tag: str | None = None

    def adjust(self, changes: Mapping[str, float]) -> None:
        self.config = adjusted(self.config, changes)

    def begin(self, first_group: int, tag: str | None) -> None:
        """Begin a step: only its groups are taken, because their comparison and their replacements belong to it."""
        self.tag = tag

    def poll(self) -> bool:
        lease = self.dock.take(self.name, Want(groups=4096, tag=self.tag))
        if lease is not None:
            self.held.append(lease)
        if not self.held or (self.algorithm.wants_whole_step(self.config) and not self._all_here()):
            return lease is not None
        with self.tally.time(self.name, rows=sum(lease.batch.rows for lease in self.held)):
            self._commit(self.held)
        self.held = []
        return True

    def _all_here(self) -> bool:
        """Say whether every sample of the step is held here or has moved on to learning."""
        return self.dock.progress(self.name, self.tag).is_all_leased

    def _commit(self, leases: list[Lease]) -> None:
        batch = Batch.concat([lease.batch for lease in leases])
        outputs, kept = self.algorithm.advantages(batch, self.config), self.algorithm.keep(batch, self.config)
        counted = np.zeros(batch.rows, np.bool_)
        start = 0
        for lease in leases:
            rows = np.arange(start, start + lease.batch.rows)
            dropped = lease.batch.values(ID)[~kept[rows]].tolist()
            counts = group_counts(lease.batch, kept[rows])
            counted[rows] = committed(lease, outputs.gather(rows), dropped, counts)
            start += lease.batch.rows
        batch, kept = batch.gather(np.flatnonzero(counted)), kept[counted]
        groups = batch.values(GROUP)
        gone = len(np.unique(groups)) - len(np.unique(groups[kept]))
        if gone and self.config.algorithm.dynamic_sampling:
            self.tally.add("refilled_groups", float(self.refill(gone)))


def group_counts(batch: Batch, kept: Any) -> Counts:
    """Return counts of whole groups. What counts once per group is kept with its first row."""
    groups = batch.values(GROUP)
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=groups[order[:1]] - 1)).tolist()
    reward = batch.values("reward")[order] if "reward" in batch else None
    sums: dict[str, list[float | None]] = {}
    means: dict[str, list[float | None]] = {}
    if not kept.all():
        sums["dropped_samples"] = [None if is_kept else 1.0 for is_kept in kept.tolist()]
        sums["dropped_groups"] = [None] * len(order)
    if reward is not None:
        means = {"equal_reward_groups": [None] * len(order), "reward_std": [None] * len(order)}
    stays = kept[order]
    for start, end in zip(starts, [*starts[1:], len(order)]):
        first = int(order[start])
        if sums and not stays[start:end].all():
            sums["dropped_groups"][first] = float(not stays[start:end].any())
        if reward is not None:
            own = reward[start:end]
            means["equal_reward_groups"][first] = float(own.max() == own.min())
            means["reward_std"][first] = float(own.std())
    return Counts(sums, means)


class ScoreWorker:
    """Computes a model's scores: log-probs of the old policy, the reference or a teacher, or a critic's values
    before it learns from this step."""

    waits = False

    def __init__(self, name: str, column: str, dock: Dock, model: Scores, config: Config, tally: Tally) -> None:
        self.name, self.column, self.dock, self.model = name, column, dock, model
        self.config, self.tally = config, tally
        self.my_turn = at_any_time  # called before the model works
        self.tag: str | None = None

    def adjust(self, changes: Mapping[str, float]) -> None:
        self.config = adjusted(self.config, changes)
        adjust_model(self.model, {key: value for key, value in changes.items() if key == TEMPERATURE})

    def begin(self, first_group: int, tag: str | None) -> None:
        """Begin a step. Policy and critic change with every step, so they score only its samples; other models do
        not."""
        self.tag = tag if self.name in ("old_logprobs", "values") else None

    def move_to(self, policy: Any) -> None:
        """Score as this model does from now on."""
        with torch.no_grad():
            new = carried(policy)
            for name, own in self.weights().items():
                own.copy_(new[name])

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of a model that this process has whole."""
        whole: Any = self.model
        return carried(whole.model)

    def poll(self) -> bool:
        lease = self.dock.take(self.name, Want(tokens=self.config.train.tokens_per_microbatch * 4, tag=self.tag))
        if lease is None:
            return False
        self.my_turn()
        with self.tally.time(self.name, rows=lease.batch.rows):
            committed(lease, Batch({self.column: self.model.logprobs(lease.batch)}))
        return True
