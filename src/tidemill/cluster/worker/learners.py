"""Ranks that learn together: each accumulates the gradients of its share, and one update is made from all of them.
Ranks that work on the same samples (tensor, context and pipeline parallel) are a team; its leader takes the team's
share from the dock. Gradients and metrics are sums, so the update is the one that a single rank would have made."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from tidemill.batch import GROUP, LENGTH, Batch
from tidemill.cluster.report import StoreAddress
from tidemill.cluster.worker.store import KeyedStore
from tidemill.device import plain
from tidemill.device.collective import backend
from tidemill.dock import Dock, Progress, Want
from tidemill.errors import CollectiveError, DockError
from tidemill.flow.schedule import has_fixed_places
from tidemill.flow.stages.learning import LearnWorker
from tidemill.flow.stages.stage import committed
from tidemill.flow.tally import Tally
from tidemill.learn.engine import Learner
from tidemill.recipe.config import Config

if TYPE_CHECKING:
    from tidemill.cluster.worker.cut import Calls, Team

MOST_GROUPS = 4096  # requested at once: all there are
LOST = -1  # reported instead of a number of rows by a rank that has lost its share


class World:
    """This process's place among the learners. With one rank nothing is sent."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.operation: tuple[str, float] | None = None  # what this rank waits in with the others, and since when
        self.store: Any = None

    def join(self, where: StoreAddress, device: torch.device, timeout_s: float) -> None:
        """Join the world; every rank calls it. The first rank's process keeps the store."""
        if self.size == 1:
            return
        timeout = timedelta(seconds=timeout_s)
        self.store = KeyedStore(where, timeout)
        with self.within("joining the world"):
            dist.init_process_group(
                backend(device.type), store=self.store, rank=self.rank, world_size=self.size, timeout=timeout
            )

    def gather(self, own: Any, what: str) -> list[Any]:
        """Gather a plain value from every rank: see `plain.gather`."""
        if self.size == 1:
            return [own]
        with self.within(what):
            return plain.gather(own, self.size)

    @contextmanager
    def within(self, operation: str) -> Iterator[None]:
        before, self.operation = self.operation, (operation, time.monotonic())
        try:
            yield
        finally:
            self.operation = before

    @contextmanager
    def all_ranks(self, name: str) -> Iterator[None]:
        """Within the context, all ranks work together. One that loses its dock on the way leaves the others waiting,
        so the error is raised for all."""
        try:
            with self.within(f"{name} of all ranks"):
                yield
        except DockError as error:
            raise CollectiveError(f"{name} of all ranks stopped half way: {error.message}") from error


class RankLearnWorker(LearnWorker):
    """Learns from its team's share of a step's groups. A step is learned once: when the ledger or leases are lost in
    between, what was accumulated is discarded before the update, and what comes back after it is only ended.

    The first rank calls when all rows have arrived, and the others follow. Ranks that compute alone, replicas of a
    whole model, accumulate gradients as their samples arrive; others do so together, when the first rank calls.
    """

    def __init__(
        self,
        dock: Dock,
        learner: Learner,
        config: Config,
        tally: Tally,
        world: World,
        calls: Calls,
        team: Team,
        name: str = "learn",
        critic: RankLearnWorker | None = None,
    ) -> None:
        self.world, self.calls, self.team, self.own, self.critic_worker = world, calls, team, learner, critic
        self.groups: Any = np.empty(0, np.int64)  # of the whole step, on all ranks; known when it is learned
        self.has_updated = False
        self._counted = np.zeros(2)  # tokens and samples accumulated since the last update of all ranks
        self._hands = {"ready": self._accumulate_early, "finish": self._finish_if_all_here}
        super().__init__(dock, learner, config, tally, name, critic)

    def begin(self, first_group: int, tag: str | None = None) -> None:
        super().begin(first_group, tag)
        self._drop_held()
        self.groups, self.has_updated = np.empty(0, np.int64), False

    def poll(self) -> bool:
        if self.is_done or not (self.team.is_leader or self.has_updated):
            return False
        before = self._progress()
        moved = self.team.is_leader and self._take(before)
        if self.has_updated:
            return self._end() or moved
        is_alone = self.own.meshes.computes_alone
        if is_alone and self._has_lost():
            self._drop_held()
            return True
        if self.calls.is_first and not moved and before.is_all_leased and self._has_critic_ended():
            return self._call("finish")
        if moved and self._fills_microbatch():
            if is_alone:
                self._accumulate_early()
            elif self.calls.is_first:
                self._call("ready")
        return moved

    def _call(self, what: str) -> bool:
        self.calls.call(f"{self.name}:{what}")
        self.together(what)
        return True

    def together(self, what: str) -> None:
        """Run the first rank's call together with all others."""
        is_alone = self.own.meshes.computes_alone
        with self.world.within(f"{self.name} of all ranks") if is_alone else self.world.all_ranks(self.name):
            self._hands[what]()

    def _has_lost(self) -> bool:
        """Say whether rows that were held here have been given to another."""
        return any(lease.is_lost for lease in self.held)

    def _has_critic_ended(self) -> bool:
        """Say whether the critic, if any, has learned from the step. Before that, a rank could be in the critic's
        exchange while another is in this one's, and the step would count as done with rows of the critic left."""
        critic = self.critic_worker
        if critic is None or critic.is_done:
            return True
        return critic.has_updated and critic._end()

    def _progress(self) -> Progress:
        """Return this stage's progress with the step, over all ranks."""
        return self.dock.progress(self.name, self.tag)

    def _take(self, before: Progress) -> bool:
        """Take everything that is this team's. What had been assigned to it before `before` was asked is then all
        held."""
        place, shares = self.team.place, self.team.count
        want = Want(groups=MOST_GROUPS, rank=place, ranks=shares, tag=self.tag)
        moved = False
        while (lease := self.dock.take(self.name, want)) is not None:
            self.held.append(lease)
            moved = True
        if shares > 1 and place == 0 and before.ready and before.ready + before.leased == before.pending:
            # Fewer groups than shares are left, and no more will arrive: the first team takes them.
            lease = self.dock.take(self.name, Want(groups=MOST_GROUPS, tag=self.tag))
            if lease is not None:
                self.held.append(lease)
                moved = True
        return moved

    def _word(self) -> tuple[list[int], int] | None:
        """Return the group of each row held here, and the number of rows in all. Only leaders hold any. A leader
        whose leases expired has accumulated what others will take, and reports LOST."""
        if not self.team.is_leader:
            return None
        if not self.calls.is_first:
            self._take(self._progress())
        own = [int(g) for lease in self.held for g in lease.batch.values(GROUP).tolist()]
        return own, LOST if self._has_lost() else self._progress().pending

    def _word_or_loss(self) -> tuple[list[int], int] | None:
        """Return `_word`, or LOST if the dock is gone: the others would wait for this rank."""
        try:
            return self._word()
        except DockError:
            return [], LOST

    def _finish_if_all_here(self) -> None:
        """Learn, if the shares of all teams make up the step, each row once; all ranks decide the same."""
        told = self.world.gather(self._word_or_loss(), "agreement on the step's samples")
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
        whole = Batch.concat([held.batch for held in self.held]) if self.held else None
        whole = self._drawn(whole, self.world.rank, self.world.size)
        if self.replays and whole is None:
            return  # too few decisions for learning to begin, which all ranks know
        place = self._place(self.groups)
        for _ in range(self.passes):
            for update in range(self.config.train.updates_per_step):
                if (place == update).any():
                    own = None
                    if whole is not None:
                        own = self._fresh(whole, self._place(whole.values(GROUP)) == update)
                    self._accumulate_share(own)
                    self.my_turn()
                    with self.tally.time(self.name, updates=1):
                        measured = self.own.update()
                    if self.calls.is_first:
                        self.tally.update(self._named(measured))
                self.accumulated = set()

    def _place(self, groups: Any) -> Any:
        """Return which of the step's updates each group belongs to."""
        updates = self.config.train.updates_per_step
        if not has_fixed_places(self.config):
            return np.searchsorted(self.groups, groups) * updates // max(1, len(self.groups))
        return (groups - self.first_group) // (self.config.train.prompts_per_step // updates)

    # Gradients of a share

    def _fills_microbatch(self) -> bool:
        early = self._early()
        return early is not None and early.values(LENGTH).sum() >= self.config.train.tokens_per_microbatch

    def _early(self) -> Batch | None:
        """Return what belongs to the first update and is not accumulated yet; None where that is not known."""
        is_known = has_fixed_places(self.config)
        if not self.held or self.only_critic or self.replays:
            return None
        if not is_known and self.config.train.updates_per_step > 1:
            return None
        ready = Batch.concat([held.batch for held in self.held])
        return self._fresh(ready, self._update_of(ready) == 0)

    def _fresh(self, batch: Batch, is_due: Any) -> Batch | None:
        rows = np.flatnonzero(is_due & ~np.isin(batch.values(GROUP), list(self.accumulated)))
        return batch.gather(rows) if len(rows) else None

    def _accumulate_early(self) -> None:
        self._accumulate_share(self._early())

    def _accumulate_share(self, batch: Batch | None) -> None:
        """Accumulate the leader's batch, which may be empty; all ranks at once, unless they compute alone."""
        self.has_begun = True
        if batch is not None:
            batch = self._counted_in(batch)
        shared = self.team.share(batch)
        self.my_turn()
        with self.tally.time(self.name, tokens=0.0 if shared is None else float(shared.values(LENGTH).sum())):
            self.own.accumulate_own(shared)
        if shared is not None:
            self.accumulated.update(int(g) for g in np.unique(shared.values(GROUP)))

    def _counted_in(self, batch: Batch) -> Batch:
        self._counted += np.array([batch.values(LENGTH).sum(), batch.rows], np.float64)
        return super()._counted_in(batch)

    # After the update, and when something was lost

    def _end(self) -> bool:
        """End what is held, after the update; return whether the whole step has ended."""
        for held in self.held:
            committed(held)  # where refused, the rows come again and are ended then
        self.held = []
        self.is_done = self._progress().is_idle
        return self.is_done

    def _drop_held(self) -> None:
        """Give everything back and discard what was accumulated from it."""
        for name, count in zip(("learned_tokens", "learned_samples"), self._counted):
            if count:
                self.tally.add(name, -float(count))
        self._counted[:] = 0
        with contextlib.suppress(DockError):  # a dock that is gone has released them
            for held in self.held:
                held.abandon()
        self.held, self.accumulated, self.has_begun = [], set(), False
        self.own.forget()
