"""The weight flow between processes: learner ranks send, rollout workers receive, over one wire that they all share.

A link holds for as long as nobody of it dies; then it is made anew from those who live. On one node it is shared
memory, between nodes a process group of its own, apart from the learner's world.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tidemill.cluster.assignment import WeightLink
from tidemill.cluster.worker.learners import World
from tidemill.cluster.worker.store import KeyedStore
from tidemill.learn.engine import Learner
from tidemill.learn.model import MeshModel, pieces_of
from tidemill.models.buffers import carried
from tidemill.reshard.dtensor import from_tensors
from tidemill.reshard.layout import Layout, merge
from tidemill.reshard.move import (
    BUCKET_BYTES,
    BufferRing,
    GroupWire,
    Job,
    Moved,
    WeightWire,
    _fill,
    _Flying,
    _laid_out,
    move,
)
from tidemill.reshard.pack import Tensors
from tidemill.reshard.plan import Plan, Topology, plan
from tidemill.reshard.record import from_plain, to_plain
from tidemill.reshard.schedule import Round
from tidemill.reshard.serve import Serving
from tidemill.reshard.shared import SharedWire

_stores: Any = dist  # where torch keeps them; its types do not say so
LEAST_BUCKET = 1 << 20
UNSERVED = -1


class Carrier:
    """One member's end of a link."""

    def __init__(self, link: WeightLink, rank: int, device: torch.device) -> None:
        self.link, self.rank = link, rank
        most = max(len(set(link.nodes)), max(link.nodes) + 1)
        per_node = max(link.nodes.count(n) for n in set(link.nodes))
        places = tuple(n * per_node + sum(m == n for m in link.nodes[:i]) for i, n in enumerate(link.nodes))
        topology = Topology(per_node if most > 1 else 0, places if most > 1 else ())
        self.plan = plan(link.source, link.target, topology, direct=link.store is None)
        bucket = min(BUCKET_BYTES, max(LEAST_BUCKET, link.source.nbytes))
        self.wire: WeightWire
        if link.store is None:
            self.wire = SharedWire(
                link.token, rank, link.ranks, bucket_bytes=bucket, device=device, timeout_s=link.timeout_s
            )
        else:
            self.wire = LooseWire(BufferRing(bucket_bytes=bucket), link, rank)

    def send(self, tensors: Tensors, version: int) -> Moved:
        return move(Job(self.plan, self.rank, tensors, {}, version, self.link.verify), self.wire)

    def receive(self, sources: Tensors, targets: Tensors, version: int) -> Moved:
        """In place: the engine does not serve meanwhile. `sources`: what this member itself has to send."""
        serving = Serving(targets, UNSERVED)
        moved = serving.receive(Job(self.plan, self.rank, sources, {}, version, self.link.verify), self.wire)
        serving.flip()
        return moved

    def close(self) -> None:
        self.wire.close()


class LooseWire(GroupWire):
    """Messages of a process group that belongs to this link alone: members come and go without the learner's world."""

    def __init__(self, ring: BufferRing, link: WeightLink, rank: int) -> None:
        super().__init__(ring, timeout_s=link.timeout_s)
        assert link.store is not None
        self._store = KeyedStore(link.store, self.timeout)
        self._members: Any = dist.ProcessGroupGloo(
            _stores.PrefixStore(link.token, self._store), rank, link.ranks, self.timeout
        )

    def _least(self, numbers: list[int]) -> list[int]:
        word = torch.tensor(numbers)
        how: Any = dist.AllreduceOptions()
        how.reduceOp = dist.ReduceOp.MIN
        self._members.allreduce([word], how).wait(self.timeout)
        least: list[int] = word.tolist()
        return least

    def _launch(self, step: Round, job: Job, moved: Moved) -> _Flying:
        turn = self._turn
        self._turn += 1
        works = []
        for peer, message, part in _laid_out(step.into, self.ring.coming(turn)):
            works.append(self._members.recv([part], peer, turn))
            moved.received_bytes += message.nbytes
        for peer, message, part in _laid_out(step.out, self.ring.going(turn)):
            _fill(message, part, job)
            works.append(self._members.send([part], peer, turn))
            moved.sent_bytes += message.nbytes
        return _Flying(turn, step, works)


class Follow:
    """A reference on the learner's ranks that now and then becomes the policy, however each of the two is cut."""

    def __init__(self, learner: Learner, reference: MeshModel, world: World) -> None:
        self.learner, self.reference, self.world = learner, reference, world
        self._plan: Plan | None = None
        self._wire: GroupWire | None = None
        self._moves = 0

    def __call__(self) -> None:
        """All ranks together."""
        if self._plan is None:
            own = [to_plain(side.layout()) for side in (self.learner, self.reference)]
            told = self.world.gather(own, "describing two models")
            source, target = (merge(from_plain(side) for side in sides) for sides in zip(*told))
            self._plan = plan(source, target)
            bucket = min(BUCKET_BYTES, max(LEAST_BUCKET, self.learner.layout().nbytes))
            self._wire = GroupWire(BufferRing(bucket_bytes=bucket, device=self.reference.device))
        assert self._wire is not None
        self._moves += 1
        targets = pieces_of(self.reference.model)
        job = Job(self._plan, self.world.rank, self.learner.pieces(), targets, self._moves)
        with self.world.within("moving the reference"):
            move(job, self._wire)


def served(model: Any) -> dict[str, torch.Tensor]:
    return carried(model)


def layout_of(tensors: dict[str, Any], rank: int) -> Layout:
    return from_tensors(tensors, rank)
