"""The weight flow between workers: layout → plan → move → take up, the same for every executor. Learner ranks send,
rollout workers receive, over one link that they all share. When a member dies, a new link is made for those that live.
In one process blocks are copied; on one node they go through shared memory, between nodes through a process group apart
from the learner's world. An engine that reads the learner's own tensors has no link: nothing is sent, it only takes the
version up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tidemill.cluster.assignment import WeightLink
from tidemill.cluster.report import MoveReport
from tidemill.cluster.worker.learners import World
from tidemill.cluster.worker.store import KeyedStore
from tidemill.flow.schedule import schedule_of
from tidemill.learn.engine import Learner
from tidemill.learn.model import MeshModel, pieces_of
from tidemill.learn.parallel.adapters import is_adapter
from tidemill.models import lora
from tidemill.models.buffers import carried, persistent
from tidemill.reshard.layouts.dtensor import from_tensors, local_tensors
from tidemill.reshard.layouts.layout import Layout, merge
from tidemill.reshard.layouts.record import from_plain, to_plain
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
from tidemill.reshard.pack import BlockMerge, Changes, Tensors
from tidemill.reshard.plan import Plan, Topology, plan
from tidemill.reshard.schedule import Round
from tidemill.reshard.serve import Aside, Serving
from tidemill.reshard.wires.one_node import SharedWire
from tidemill.reshard.wires.one_process import OneProcessWire
from tidemill.rollout.native.ranks import share

if TYPE_CHECKING:
    from tidemill.cluster.worker.worker_state import WorkerState

_stores: Any = dist  # torch's types do not list them here
LEAST_BUCKET = 1 << 20


@dataclass(frozen=True, slots=True)
class Sources:
    """What a learner sends, and how it is transformed on the way."""

    tensors: Tensors
    changes: Changes | None = None


class WeightPort:
    """A worker's end of the weight flow."""

    def __init__(self, state: WorkerState) -> None:
        self.state = state
        self.is_whole = state.learner is not None  # the engine has a whole version
        self._sends_adapters = False  # the engines want nothing else
        self._carrier: Carrier | None = None
        self._serving: Serving | None = None
        self._lock = threading.Lock()  # a link does not end while a version travels over it

    # Layout

    def sources(self) -> Sources:
        """Return the current policy; nothing where none is trained."""
        state = self.state
        if state.learner is None:
            return Sources({})
        if state.is_cut:
            own = state.learner.adapter_pieces()
            return Sources(own if self._sends_adapters else state.learner.pieces() | own)
        state.learner.publish()
        assert state.loaded is not None
        return learned(state.loaded.model)

    def serving(self) -> Serving:
        """Return where the engine's own weights are written, if it has any. Where rollout continues meanwhile, the
        next version is written aside."""
        if self._serving is None:
            model = self.state.loaded.model if self.state.loaded is not None and self._has_own else None
            tensors = {} if model is None else received(model)
            self._serving = Serving(tensors, aside=aside_of(tensors) if self.writes_aside else "none")
        return self._serving

    @property
    def _has_own(self) -> bool:
        return self.state.is_shared or (self.state.engine is not None and not self.state.shares_tensors)

    @property
    def writes_aside(self) -> bool:
        return self._has_own and self.state.learner is None and schedule_of(self.state.config).serves_on

    def describe(self, rank: int, mates: tuple[int, ...]) -> tuple[Layout, Layout]:
        is_cut, learner = self.state.is_cut, self.state.learner
        sent = learner.layout() if is_cut else from_tensors(dict(self.sources().tensors), rank)
        if self.state.is_shared:
            assert self.state.loaded is not None
            return sent, share.of(self.state.loaded.model).layout(mates)
        return sent, from_tensors(dict(self.serving().tensors), rank)

    def lay_out_experts(self) -> bool:
        """Choose anew where the engine's experts lie, by their load; whether any moves with the next version."""
        part = self.state.engine_part
        if part is None or part.balance is None:
            return False
        with self._between_steps():
            busiest = part.balance.plan()
        if self.state.lead is not None:
            self.state.tally.mean("moe_engine_busiest", busiest)
        return part.balance.is_due

    # Plan

    def link(self, link: WeightLink, rank: int) -> None:
        self.unlink()
        self._sends_adapters = bool(link.target.by_name) and all(is_adapter(name) for name in link.target.by_name)
        if link.one_process is not None and self.state.learner is not None:
            link.one_process.sources = self.sources
            return  # receives copies
        self._carrier = Carrier(link, rank, self.state.device)

    def unlink(self) -> None:
        with self._lock:
            if self._carrier is not None:
                self._carrier.close()
                self._carrier = None

    # Move

    def move(self, version: int) -> MoveReport:
        """Send and receive while no work is done."""
        self.state.publishing()
        if self._carrier is None:
            return MoveReport(0, 0, 0.0)
        if not self._has_own:
            return self._carry(self._carrier, Serving({}), version)
        self.is_whole = False
        with self._between_steps():
            return self._carry(self._carrier, self.serving(), version)

    def receive(self, version: int) -> MoveReport:
        """Write a version aside, from any thread, while the work continues."""
        with self._lock:
            assert self._carrier is not None
            return self._carry(self._carrier, self.serving(), version)

    def _carry(self, carrier: Carrier, serving: Serving, version: int) -> MoveReport:
        """Move, and count the time once: where the learner's tensors are read."""
        here = carrier.link.one_process
        sources = here.sources() if here is not None and here.sources is not None else self.sources()
        with self.state.tally.time("publish") if sources.tensors else self.state.tally.shown("publish"):
            return carrier.move(sources, serving, version)

    # Take up

    def take_up(self, version: int) -> int:
        """Serve the received version from the next token on. Unfinished samples continue under it. Return the bytes
        that an engine with weights of its own took from the learner's."""
        state, engine = self.state, self.state.engine
        if state.shares_tensors:
            state.learner.publish()
        if self.writes_aside:
            with self._between_steps():
                self.serving().flip()
        if engine is None:
            return 0
        self.is_whole = True
        if state.turns is not None and state.turns.serve(version):
            return 0
        reread = state.config.flow.unfinished_samples == "recompute_kv" and engine.has_work
        unfinished = engine.pause() if reread else []
        engine.load(None, version)
        engine.resume(unfinished)
        if resumed := sum(bool(p.tokens) for p in unfinished):
            state.tally.add("resumed_samples", float(resumed))
        return int(getattr(engine, "brought_bytes", 0)) if state.shares_tensors else 0

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Within the context, all ranks of an engine are between the same two steps."""
        state = self.state
        if state.lead is not None:
            state.lead.order()
        if state.follower is None:
            yield
            return
        with state.follower.at_order(state.config.cluster.collective_s):
            yield


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
        if link.one_process is not None:
            self.wire = OneProcessWire(bucket)
        elif link.store is None:
            self.wire = SharedWire(
                link.token, rank, link.ranks, bucket_bytes=bucket, device=device, timeout_s=link.timeout_s
            )
        else:
            self.wire = LooseWire(BufferRing(bucket_bytes=bucket), link, rank)

    def move(self, sources: Sources, serving: Serving, version: int) -> MoveReport:
        """Move a whole version or none. `sources`: what this member sends."""
        job = Job(self.plan, self.rank, sources.tensors, {}, version, self.link.verify, sources.changes)
        moved = serving.receive(job, self.wire)
        return MoveReport(moved.received_bytes + moved.copied_bytes, moved.checked, moved.seconds)

    def close(self) -> None:
        self.wire.close()


class LooseWire(GroupWire):
    """A process group for this link alone: members come and go without affecting the learner's world."""

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


def aside_of(tensors: Tensors) -> Aside:
    """Write into existing tensors on an accelerator, whose captured graphs hold their addresses; replace them
    elsewhere."""
    on_host = all(t.device.type == "cpu" for t in tensors.values())
    return "device" if on_host else "copy"


def learned(model: Any) -> Sources:
    """Return the weights that rollout may serve, under its names. Adapters are there by themselves, and merged block by
    block, as these are read."""
    tensors = carried(model)
    changes = {f"{n}.weight": adapter_of(m) for n, m in model.named_modules() if isinstance(m, lora.LoraLinear)}
    for name, m, stack in lora.adapted_stacks(model):
        a, b = (getattr(m, f"{stack}_lora_{side}").detach() for side in "ab")
        changes[name] = BlockMerge(a, b, m.lora_factor)
    return Sources(local_tensors(tensors), changes or None)


def received(model: Any) -> Tensors:
    """Return the tensors that come to an engine's model from the learner: its adapters' where it has some."""
    own = dict(model.named_parameters())
    return {name: p for name, p in own.items() if is_adapter(name)} or {**own, **persistent(model)}


def adapter_of(linear: lora.LoraLinear) -> BlockMerge:
    """Return what turns a frozen weight into the one that the learner computes with."""
    rows = None if linear.lora_m is None else linear.lora_m.detach() / linear.row_norms().to(linear.lora_m.dtype)
    return BlockMerge(linear.lora_a.detach(), linear.lora_b.detach(), linear.factor, rows)


class Follow:
    """Copies the policy into a reference on the learner's ranks, however each of the two is cut."""

    def __init__(self, learner: Learner, reference: MeshModel, world: World) -> None:
        self.learner, self.reference, self.world = learner, reference, world
        self._plan: Plan | None = None
        self._wire: GroupWire | None = None
        self._moves = 0

    def __call__(self) -> None:
        """Copy, all ranks together."""
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
