"""Ranks that learn together: each adds up the gradients of its share, one all-reduce makes an update of all of them.

The share of a rank is whatever the dock gave it; gradients and metrics are sums, so the update is the one that a
single rank would have made.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from tidemill.batch import GROUP, Batch
from tidemill.cluster.report import StoreAddress
from tidemill.cluster.worker.store import KeyedStore
from tidemill.device.collective import backend
from tidemill.dock import Dock, Progress, Want
from tidemill.flow.learning import LearnWorker
from tidemill.flow.stage import committed
from tidemill.flow.tally import Tally
from tidemill.learn.engine import Learner, stats_from_plain, stats_to_plain
from tidemill.learn.parallel import plain
from tidemill.recipe.config import Config

if TYPE_CHECKING:
    from tidemill.learn.parallel.learner import ParallelLearner

MOST_GROUPS = 4096  # asked for at once: all there are


class World:
    """This process among those that learn. With one rank nothing is sent."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.operation: tuple[str, float] | None = None  # what this rank waits in with the others, and since when
        self.store: Any = None

    def join(self, where: StoreAddress, device: torch.device, timeout_s: float) -> None:
        """Make the world: every rank calls it. The first rank's process keeps the store."""
        if self.size == 1:
            return
        timeout = timedelta(seconds=timeout_s)
        self.store = KeyedStore(where, timeout)
        with self.within("joining the world"):
            dist.init_process_group(
                backend(device.type), store=self.store, rank=self.rank, world_size=self.size, timeout=timeout
            )

    def gather(self, own: Any, what: str) -> list[Any]:
        """Every rank's word, a plain value: see `plain.gather`."""
        if self.size == 1:
            return [own]
        with self.within(what):
            return plain.gather(own, self.size)

    def update(self, learner: Learner) -> dict[str, float]:
        """One optimizer step from what all ranks accumulated."""
        if self.size > 1:
            self._share(learner)
        return learner.update()

    def _share(self, learner: Learner) -> None:
        parts = self.gather((learner._whole, stats_to_plain(learner._stats)), "gathering of metrics")
        learner._whole = sum(whole for whole, _ in parts)
        learner._stats = [stats for _, listed in parts for stats in stats_from_plain(listed)]
        gradients = learner.gradients
        given = torch.tensor([gradients.of(p) is not None for p in gradients.parameters], dtype=torch.int32)
        with self.within("all-reduce of gradients"):
            dist.all_reduce(given, dist.ReduceOp.MAX)
            for p, is_given in zip(gradients.parameters, given.tolist()):
                if is_given:  # somewhere; a rank without samples of it adds zero
                    dist.all_reduce(gradients.ensure(p))
            for loads in learner.routers.sums() if learner.routers is not None else ():
                dist.all_reduce(loads)

    @contextmanager
    def within(self, operation: str) -> Iterator[None]:
        before, self.operation = self.operation, (operation, time.monotonic())
        try:
            yield
        finally:
            self.operation = before


class RankLearnWorker(LearnWorker):
    """Learns its share of a step's groups. A step is learned once: when ledger or leases went in between, what was
    accumulated is thrown away before the update, and what comes back after it is only ended."""

    def __init__(
        self,
        dock: Dock,
        learner: Learner | ParallelLearner,
        config: Config,
        tally: Tally,
        world: World,
        name: str = "learn",
        critic: LearnWorker | None = None,
    ) -> None:
        self.world = world
        self.groups: Any = np.empty(0, np.int64)  # of the whole step, on all ranks; known when it is learned
        self.has_updated = False
        self.started_over = 0
        self.own = learner
        self._counted = np.zeros(2)  # tokens and samples accumulated since the last update of all ranks
        super().__init__(dock, learner, config, tally, name, critic)

    def begin(self, first_group: int, tag: str | None = None) -> None:
        super().begin(first_group, tag)
        self._drop_held()
        self.groups, self.has_updated = np.empty(0, np.int64), False

    def poll(self) -> bool:
        if self.is_done:
            return False
        before = self._progress()
        moved = self._take(before)
        if self._has_lost() and not self.has_updated:
            self._drop_held()
            return True
        if self.has_updated:
            return self._end() or moved
        if not moved and before.is_all_leased and self._has_critic_ended():
            self._finish_if_all_here()
            return True
        if moved:
            self._accumulate_ready()
        return moved

    @property
    def share(self) -> tuple[int, int]:
        """Which of the shares that the dock deals out is taken here, and of how many."""
        return self.world.rank, self.world.size

    def _has_lost(self) -> bool:
        """Whether rows that were held here are someone else's now."""
        return any(lease.is_lost for lease in self.held)

    def _has_critic_ended(self) -> bool:
        """Whether the critic, if there is one, has learned from the step. Before that a rank could be at the critic's
        exchange while another is at this one's, and the step would count as done with critic's rows left."""
        critic = self.critic
        if not isinstance(critic, RankLearnWorker) or critic.is_done:
            return True
        return critic.has_updated and critic._end()

    def _progress(self) -> Progress:
        """How far this stage is with the step, on all ranks."""
        return self.dock.progress(self.name, self.tag)

    def _take(self, before: Progress) -> bool:
        """Take all that is this rank's. Decisions made before `before` was asked are then all held."""
        place, shares = self.share
        want = Want(groups=MOST_GROUPS, rank=place, ranks=shares, tag=self.tag)
        moved = False
        while (lease := self.dock.take(self.name, want)) is not None:
            self.held.append(lease)
            moved = True
        if shares > 1 and place == 0 and before.ready and before.ready + before.leased == before.pending:
            # Fewer groups than shares are left, and no more will come: the first rank takes them.
            lease = self.dock.take(self.name, Want(groups=MOST_GROUPS, tag=self.tag))
            if lease is not None:
                self.held.append(lease)
                moved = True
        return moved

    def _word(self) -> tuple[list[int], int] | None:
        """The groups held here, one of each row, and how many rows there are in all."""
        own = [int(g) for lease in self.held for g in lease.batch.values(GROUP).tolist()]
        return own, self._progress().pending

    def _finish_if_all_here(self) -> None:
        """Learn, if the shares of all ranks make up the step, each row once; all ranks decide alike."""
        told = self.world.gather(self._word(), "agreement on the step's samples")
        words = [word for word in told if word is not None]
        union = [set(groups) for groups, _ in words]
        every = sorted(set().union(*union))
        total = sum(len(groups) for groups, _ in words)
        if len(every) != sum(map(len, union)) or any(total != seen for _, seen in words):
            self._drop_held()
            return
        self.groups = np.array(every, np.int64)
        if len(every) and not self.only_critic:
            self._learn_share()
        self.has_updated = True
        self._counted[:] = 0
        self._end()

    def _learn_share(self) -> None:
        assert isinstance(self.own, Learner)
        whole = Batch.concat([held.batch for held in self.held]) if self.held else None
        place = self._place(self.groups)
        for _ in range(self.passes):
            for update in range(self.config.train.updates_per_step):
                if whole is not None:
                    fresh = ~np.isin(whole.values(GROUP), list(self.accumulated))
                    rows = np.flatnonzero((self._place(whole.values(GROUP)) == update) & fresh)
                    if len(rows):
                        self._accumulate(whole.gather(rows))
                if (place == update).any():
                    self.has_begun = True
                    self.my_turn()
                    with self.tally.time(self.name):
                        measured = self.world.update(self.own)
                    if self.world.rank == 0:
                        self.tally.update(self._named(measured))
                self.accumulated = set()

    def _counted_in(self, batch: Batch) -> Batch:
        self._counted += np.array([batch["tokens"].lengths.sum(), batch.rows], np.float64)
        return super()._counted_in(batch)

    def _place(self, groups: Any) -> Any:
        """Which of the step's updates each group belongs to."""
        updates = self.config.train.updates_per_step
        if self.config.algorithm.dynamic_sampling:
            return np.searchsorted(self.groups, groups) * updates // max(1, len(self.groups))
        return (groups - self.first_group) // (self.config.train.prompts_per_step // updates)

    def _end(self) -> bool:
        """After the update: end what is held. Whether the whole step is ended."""
        for held in self.held:
            committed(held)  # refused: the rows come again, and are ended then
        self.held = []
        self.is_done = self._progress().is_idle
        return self.is_done

    def _drop_held(self) -> None:
        """Give everything back and forget what was accumulated of it."""
        if self.held:
            self.started_over += 1
        for name, count in zip(("learned_tokens", "learned_samples"), self._counted):
            if count:
                self.tally.add(name, -float(count))
        self._counted[:] = 0
        for held in self.held:
            held.abandon()
        self.held, self.accumulated, self.has_begun = [], set(), False
        self.own.forget()
