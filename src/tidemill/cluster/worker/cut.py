"""A learner cut over ranks that are workers: who takes samples, and in which order ranks do what they do together.

Every pass through a cut model is an exchange between its ranks, so all of them must begin it, in one order. The first
rank calls; the others follow. Ranks that work on the same samples (tensor, context and pipeline parallel) are a team:
its leader takes the team's share from the dock and hands it round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tidemill.batch import GROUP, Batch
from tidemill.cluster.worker.learners import RankLearnWorker, World
from tidemill.dock import Dock, Lease, Want
from tidemill.dock.store import chunk
from tidemill.errors import CollectiveError, DockError
from tidemill.flow.learning import LearnWorker
from tidemill.flow.scoring import ScoreWorker
from tidemill.flow.stage import committed
from tidemill.flow.tally import Tally
from tidemill.learn.parallel import plain
from tidemill.learn.parallel.learner import ParallelLearner
from tidemill.learn.parallel.mesh import Meshes
from tidemill.learn.parallel.model import ParallelModel
from tidemill.recipe.config import Config

ORDER = "order"  # what the driver told all ranks has its place among the calls
KEPT_CALLS = 256  # in the store: no rank is as far behind
SCORED_MICROBATCHES = 4  # a team's, at a time


class Calls:
    """A list in the ranks' store that the first rank adds to."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.is_first = store, rank == 0
        self.number = 0

    def call(self, what: str) -> None:
        self.store.set(self._key(self.number), what)
        if self.number >= KEPT_CALLS:
            self.store.delete_key(self._key(self.number - KEPT_CALLS))
        self.number += 1

    def heard(self) -> str | None:
        """The next one, if it has been made. Never waits: other work may come first."""
        key = self._key(self.number)
        if not self.store.check([key]):
            return None
        self.number += 1
        return str(self.store.get(key).decode())

    @staticmethod
    def _key(number: int) -> str:
        return f"call/{number}"


class Team:
    """Ranks that work on the same samples, as one of them sees it."""

    def __init__(self, meshes: Meshes, timeout_s: float) -> None:
        self.place, self.count = meshes.dp_rank, meshes.dp_size  # of this team among all
        grid = meshes.mesh.mesh.permute(1, 2, 0, 3, 4)  # (replicate, fsdp, pp, cp, tp)
        teams = grid.reshape(self.count, -1).tolist()
        self.leader = int(teams[self.place][0])
        self.is_leader = dist.get_rank() == self.leader
        self.group: Any = None
        if len(teams[0]) > 1:
            timeout = timedelta(seconds=timeout_s)
            groups: Any = dist  # its types say nothing of this
            self.group, _ = groups.new_subgroups_by_enumeration(teams, timeout=timeout, backend="gloo")

    def share(self, batch: Batch | None) -> Batch | None:
        """The leader's, on all."""
        if self.group is None:
            return batch
        own = chunk.to_bytes(batch) if self.is_leader and batch is not None else None
        found = plain.broadcast(None if own is None else torch.from_numpy(own), self.leader, self.group)
        return None if found is None else chunk.read(found.numpy())


@contextmanager
def all_ranks(world: World, name: str) -> Iterator[None]:
    """What all ranks must come through. One that loses its dock on the way has left the others waiting."""
    try:
        with world.within(f"{name} of all ranks"):
            yield
    except DockError as error:
        raise CollectiveError(f"{name} of all ranks stopped half way: {error.message}") from error


class CutScoreWorker(ScoreWorker):
    """Log-probabilities under a cut model: every team scores a share."""

    def __init__(
        self,
        name: str,
        column: str,
        dock: Dock,
        model: ParallelModel,
        config: Config,
        tally: Tally,
        world: World,
        calls: Calls,
        team: Team,
        follow: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(name, column, dock, model, config, tally)
        self.world, self.calls, self.team = world, calls, team
        self._follow = follow

    def move_to(self, _: Any) -> None:
        """All ranks together: the policy is the learner beside it."""
        assert self._follow is not None
        self._follow()

    def weights(self) -> dict[str, Tensor]:
        """Nobody has them whole: ranks write and read their pieces."""
        return {}

    def poll(self) -> bool:
        lease = self._take() if self.calls.is_first else None
        if lease is None:
            return False
        self.calls.call(self.name)
        with all_ranks(self.world, self.name):
            self._score(lease)
        return True

    def together(self, _: str) -> None:
        with all_ranks(self.world, self.name):
            self._score(self._take() if self.team.is_leader else None)

    def _take(self) -> Lease | None:
        budget = self.config.train.tokens_per_microbatch * SCORED_MICROBATCHES
        team, lease = self.team, None
        if team.count > 1:
            share = Want(tokens=budget * team.count, rank=team.place, ranks=team.count, tag=self.tag)
            lease = self.dock.take(self.name, share)
        if lease is None and self.calls.is_first:  # too few for all teams
            lease = self.dock.take(self.name, Want(tokens=budget, tag=self.tag))
        return lease

    def _score(self, lease: Lease | None) -> None:
        self.my_turn()
        with self.tally.time(self.name):
            found = self.model.logprobs_own(self.team.share(None if lease is None else lease.batch))
            if lease is not None:
                committed(lease, Batch({self.column: found}))


class CutLearnWorker(RankLearnWorker):
    """As its base, of ranks that cannot compute alone: what one of them loses is lost to all."""

    def __init__(
        self,
        dock: Dock,
        learner: ParallelLearner,
        config: Config,
        tally: Tally,
        world: World,
        calls: Calls,
        team: Team,
        name: str = "learn",
        critic: LearnWorker | None = None,
    ) -> None:
        self.calls, self.team, self.parts = calls, team, learner
        early, finish = self._accumulate_early, self._finish_if_all_here
        self._hands: dict[str, Callable[[], None]] = {"ready": early, "finish": finish}
        super().__init__(dock, learner, config, tally, world, name, critic)

    @property
    def share(self) -> tuple[int, int]:
        return self.team.place, self.team.count

    def poll(self) -> bool:
        if self.is_done or not (self.team.is_leader or self.has_updated):
            return False
        before = self._progress()
        moved = self.team.is_leader and self._take(before)
        if self.has_updated:
            return self._end() or moved
        if not self.calls.is_first:
            return moved
        if not moved and before.is_all_leased and self._has_critic_ended():
            return self._call("finish")
        if moved and self._fills_microbatch():
            self._call("ready")
        return moved

    def _call(self, what: str) -> bool:
        self.calls.call(f"{self.name}:{what}")
        self.together(what)
        return True

    def together(self, what: str) -> None:
        with all_ranks(self.world, self.name):
            self._hands[what]()

    def _word(self) -> tuple[list[int], int] | None:
        """Only leaders hold anything. One whose leases ran out has accumulated what others will take: no step then."""
        if not self.team.is_leader:
            return None
        if not self.calls.is_first:
            self._take(self._progress())
        groups, rows = super()._word() or ([], 0)
        return groups, -1 if self._has_lost() else rows

    def _fills_microbatch(self) -> bool:
        early = self._early()
        return early is not None and early["tokens"].lengths.sum() >= self.config.train.tokens_per_microbatch

    def _early(self) -> Batch | None:
        """Of the first update, what was not accumulated yet; None where it is not known what belongs to it."""
        is_dynamic = self.config.algorithm.dynamic_sampling
        if not self.held or self.only_critic or (is_dynamic and self.config.train.updates_per_step > 1):
            return None
        ready = Batch.concat([held.batch for held in self.held])
        return self._fresh(ready, self._update_of(ready) == 0)

    def _fresh(self, batch: Batch, is_due: Any) -> Batch | None:
        rows = np.flatnonzero(is_due & ~np.isin(batch.values(GROUP), list(self.accumulated)))
        return batch.gather(rows) if len(rows) else None

    def _accumulate_early(self) -> None:
        self._accumulate_share(self._early())

    def _accumulate_share(self, batch: Batch | None) -> None:
        """All ranks at once: what this team's leader gives, which may be nothing."""
        self.has_begun = True
        if batch is not None:
            batch = self._counted_in(batch)
        shared = self.team.share(batch)
        self.my_turn()
        with self.tally.time(self.name):
            self.parts.accumulate_own(shared)
        if shared is not None:
            self.accumulated.update(int(g) for g in np.unique(shared.values(GROUP)))

    def _learn_share(self) -> None:
        whole = Batch.concat([held.batch for held in self.held]) if self.held else None
        place = self._place(self.groups)
        for _ in range(self.passes):
            for update in range(self.config.train.updates_per_step):
                if (place == update).any():
                    own = None
                    if whole is not None:
                        own = self._fresh(whole, self._place(whole.values(GROUP)) == update)
                    self._accumulate_share(own)
                    with self.tally.time(self.name):
                        measured = self.parts.update()
                    if self.calls.is_first:
                        self.tally.update(self._named(measured))
                self.accumulated = set()
