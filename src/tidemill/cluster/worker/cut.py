"""Learners over workers: who takes samples, and in which order ranks do collective work. Every pass through a cut model
is an exchange between its ranks, so all of them must begin it in the same order. The first rank calls; the others
follow. Ranks that work on the same samples (tensor, context and pipeline parallel) are a team: its leader takes the
team's share from the dock and broadcasts it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tidemill.batch import Batch
from tidemill.cluster.worker.learners import World
from tidemill.device import plain
from tidemill.dock import Dock, Lease, Want
from tidemill.dock.store import chunk
from tidemill.flow.stages.scoring import ScoreWorker
from tidemill.flow.stages.stage import committed
from tidemill.flow.tally import Tally
from tidemill.learn.model import MeshModel
from tidemill.learn.parallel.mesh import Meshes
from tidemill.recipe.config import Config

ORDER = "order"  # marks the place of a command to all ranks among the calls
KEPT_CALLS = 256  # kept in the store: no rank is that far behind
SCORED_MICROBATCHES = 4  # a team's, at a time


class Calls:
    """The first rank's calls: a list in the ranks' store. A single rank calls nobody."""

    def __init__(self, world: World) -> None:
        self.world, self.is_first = world, world.rank == 0
        self.number = 0

    def call(self, what: str) -> None:
        if self.world.size == 1:
            return
        self.world.store.set(self._key(self.number), what)
        if self.number >= KEPT_CALLS:
            self.world.store.delete_key(self._key(self.number - KEPT_CALLS))
        self.number += 1

    def heard(self) -> str | None:
        """Return the next call, if it has been made. Never waits: other work may come first."""
        found = None if self.world.store is None else self.world.store.poll(self._key(self.number))
        if found is None:
            return None
        self.number += 1
        return str(found.decode())

    @staticmethod
    def _key(number: int) -> str:
        return f"call/{number}"


class Team:
    """The ranks that work on the same samples, from the view of one of them."""

    def __init__(self, place: int = 0, count: int = 1) -> None:
        self.place, self.count = place, count  # this team's place among all
        self.leader, self.is_leader = place, True
        self.group: Any = None

    @staticmethod
    def of(meshes: Meshes, timeout_s: float) -> Team:
        """Make the teams. All ranks call it together."""
        made = Team(meshes.dp_rank, meshes.dp_size)
        if meshes.made is None:
            return made
        grid = meshes.made.mesh.mesh.permute(1, 2, 0, 3, 4)  # (replicate, fsdp, pp, cp, tp)
        teams = grid.reshape(made.count, -1).tolist()
        made.leader = int(teams[made.place][0])
        made.is_leader = dist.get_rank() == made.leader
        if len(teams[0]) > 1:
            timeout = timedelta(seconds=timeout_s)
            groups: Any = dist  # its types lack this
            made.group, _ = groups.new_subgroups_by_enumeration(teams, timeout=timeout, backend="gloo")
        return made

    def share(self, batch: Batch | None) -> Batch | None:
        """Return the leader's batch on all ranks of the team."""
        if self.group is None:
            return batch
        own = chunk.to_bytes(batch) if self.is_leader and batch is not None else None
        found = plain.broadcast(None if own is None else torch.from_numpy(own), self.leader, self.group)
        return None if found is None else chunk.read(found.numpy())


class CutScoreWorker(ScoreWorker):
    """Scores log-probs under a cut model: every team scores a share."""

    def __init__(
        self,
        name: str,
        column: str,
        dock: Dock,
        model: MeshModel,
        config: Config,
        tally: Tally,
        world: World,
        calls: Calls,
        team: Team,
        follow: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(name, column, dock, model, config, tally)
        self.own, self.world, self.calls, self.team = model, world, calls, team
        self._follow = follow

    def move_to(self, _: Any) -> None:
        """Follow the policy, all ranks together: the policy is the learner beside it."""
        assert self._follow is not None
        self._follow()

    def weights(self) -> dict[str, Tensor]:
        """Return nothing: no rank has whole tensors, each writes and reads its pieces."""
        return {}

    def poll(self) -> bool:
        lease = self._take() if self.calls.is_first else None
        if lease is None:
            return False
        self.calls.call(self.name)
        with self.world.all_ranks(self.name):
            self._score(lease)
        return True

    def together(self, _: str) -> None:
        with self.world.all_ranks(self.name):
            self._score(self._take() if self.team.is_leader else None)

    def _take(self) -> Lease | None:
        budget = self.config.train.tokens_per_microbatch * SCORED_MICROBATCHES
        team, lease = self.team, None
        if team.count > 1:
            share = Want(tokens=budget * team.count, rank=team.place, ranks=team.count, tag=self.tag)
            lease = self.dock.take(self.name, share)
        if lease is None and self.calls.is_first:  # too few rows for all teams
            lease = self.dock.take(self.name, Want(tokens=budget, tag=self.tag))
        return lease

    def _score(self, lease: Lease | None) -> None:
        self.my_turn()
        with self.tally.time(self.name):
            found = self.own.logprobs_own(self.team.share(None if lease is None else lease.batch))
            if lease is not None and found is not None:
                committed(lease, Batch({self.column: found}))
