"""Pipeline parallel: each rank has some runs of layers; activations go forward between ranks, gradients come back.

Packed micro-batches differ in length, which fixed-shape pipelines cannot take. Here every stage knows the lengths, for
all are given the same samples, so a message is exactly as long as its tokens: nothing is padded, not even on the wire.
The first stage has the embedding, the last the final norm, the output layer and the loss. Where these two share one
weight each keeps a copy; `ends` are the two ranks that add their gradients up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import ModuleList

from tidemill.learn.parallel.collectives import MeshLink
from tidemill.learn.parallel.schedule import Action, Timetable, forward_only, timetable
from tidemill.learn.rows.packing import PackedBatch
from tidemill.models.calling import through
from tidemill.models.layers.stages import Elsewhere, norm_name, stage_of
from tidemill.models.parts import decoder_of

Group = Any
Call = Callable[[int, PackedBatch, Tensor | None], Any]
Finish = Callable[[int, Any], Tensor]  # micro-batch, what the last stage gave → the loss
Wire = Callable[[PackedBatch], tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    work: Any
    tensor: Tensor  # kept until it has been read
    peer: int
    read_at: int  # by which of the peer's actions


@dataclass(slots=True)
class _Run:
    """One pass of micro-batches through the pipeline."""

    table: Timetable
    passes: Sequence[PackedBatch]
    finish: Finish
    kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = field(default_factory=dict)  # a stage's in- and output
    sent: list[_Sent] = field(default_factory=list)


class Stages:
    """This rank's stages of a model that `split` has cut, each to be called by itself."""

    def __init__(self, model: Any, rank: int, ranks: int, chunks: int = 1) -> None:
        self.last = ranks * chunks - 1
        self.views = {stage: self._view(decoder_of(model), stage) for stage in range(rank, self.last + 1, ranks)}

    def __call__(self, stage: int, packed: PackedBatch, came: Tensor | None) -> Tensor:
        """(1, tokens, width) from the stage before, None for the first → the same after this stage."""
        start = {"input_ids": packed.tokens[None]} if came is None else {"inputs_embeds": came}
        return through(self.views[stage], packed.context, **start, position_ids=packed.positions[None])

    def _view(self, decoder: Any, stage: int) -> Any:
        """The decoder with one stage's layers alone; its weights and hooks are the decoder's own."""
        layers = len(decoder.layers)
        view = copy.copy(decoder)
        view._modules = dict(decoder._modules)
        view.layers = ModuleList(
            layer if stage_of(i, layers, self.last + 1) == stage else Elsewhere(getattr(layer, "layer_type", None))
            for i, layer in enumerate(decoder.layers)
        )
        if stage != self.last:
            setattr(view, norm_name(decoder), Elsewhere())
        return view


class Pipeline:
    """Runs micro-batches through stages. `over`: the ranks of the pipeline in their order.

    `call(stage, packed, came)` gives what goes to the next stage, or, on the last, what `finish` takes. `wire`: the
    shape of what lies between two stages.
    """

    def __init__(
        self, over: MeshLink, chunks: int, call: Call, wire: Wire, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.over, self.chunks, self.call, self.wire = over, chunks, call, wire
        self.dtype, self.device = dtype, device
        self.rank, self.ranks = over.rank, over.size
        self.last = self.ranks * chunks - 1
        self.lanes = _lanes(over.group)

    def learn(self, passes: Sequence[PackedBatch], finish: Finish) -> None:
        """Forward and backward of all micro-batches. `finish` is called on the last rank and gives the loss."""
        self._play(_Run(timetable(self.ranks, self.chunks, len(passes)), passes, finish))

    @torch.no_grad()
    def score(self, passes: Sequence[PackedBatch], finish: Finish) -> None:
        """Forward alone. `finish` is called on the last rank, in the order of micro-batches."""
        self._play(_Run(forward_only(self.ranks, self.chunks, len(passes)), passes, finish))

    def _play(self, run: _Run) -> None:
        for action in run.table[self.rank]:
            (self._forward if action.is_forward else self._backward)(run, action)
        for sent in run.sent:
            sent.work.wait()

    def _forward(self, run: _Run, action: Action) -> None:
        packed, stage = run.passes[action.microbatch], action.stage
        came = None
        if stage:
            came = self._receive(run, action, Action(True, stage - 1, action.microbatch))
            came.requires_grad_(torch.is_grad_enabled())
        out = self.call(stage, packed, came)
        if stage == self.last:
            out = run.finish(action.microbatch, out)
        else:
            self._send(run, out.detach(), action, Action(True, stage + 1, action.microbatch))
        if torch.is_grad_enabled():
            run.kept[stage, action.microbatch] = came, out

    def _backward(self, run: _Run, action: Action) -> None:
        stage = action.stage
        came, out = run.kept.pop((stage, action.microbatch))
        if stage == self.last:
            out.backward()  # type: ignore[no-untyped-call]
        else:
            grad = self._receive(run, action, Action(False, stage + 1, action.microbatch))
            torch.autograd.backward(out, grad)
        if came is not None:
            assert came.grad is not None
            self._send(run, came.grad, action, Action(False, stage - 1, action.microbatch))

    def _send(self, run: _Run, x: Tensor, made_by: Action, read_by: Action) -> None:
        peer = read_by.stage % self.ranks
        x = x.contiguous()
        work = dist.isend(x, self.over.ranks[peer], self._lane(made_by), self._tag(made_by, len(run.passes)))
        run.sent.append(_Sent(work, x, peer, run.table[peer].index(read_by)))

    def _receive(self, run: _Run, wanted_by: Action, made_by: Action) -> Tensor:
        peer = made_by.stage % self.ranks
        x = torch.empty(self.wire(run.passes[wanted_by.microbatch]), dtype=self.dtype, device=self.device)
        what = "activations" if made_by.is_forward else "gradients"
        tag = self._tag(made_by, len(run.passes))
        work = dist.irecv(x, self.over.ranks[peer], self._lane(made_by), tag)
        self.over.wait(f"receive of {what} from rank {self.over.ranks[peer]}", x[0], [work])
        # Whatever the peer had to read before it made this, it has read.
        made_at = run.table[peer].index(made_by)
        for sent in [s for s in run.sent if s.peer == peer and s.read_at < made_at]:
            sent.work.wait()
            run.sent.remove(sent)
        return x

    def _lane(self, made_by: Action) -> Group:
        """Each direction between two ranks has its own channel: one that waited for the other could wait for ever."""
        wraps = made_by.stage % self.ranks == (self.ranks - 1 if made_by.is_forward else 0)
        return self.lanes[2 * made_by.is_forward + wraps]

    def _tag(self, made_by: Action, microbatches: int) -> int:
        return (2 * made_by.stage + made_by.is_forward) * microbatches + made_by.microbatch


def ends(group: Group) -> Group | None:
    """The first and the last rank of a pipeline, which each have a copy of a tied weight; None on the others."""
    members = dist.get_process_group_ranks(group)
    pair = [members[0], members[-1]]
    return dist.new_group(pair, use_local_synchronization=True) if dist.get_rank() in pair else None


def _lanes(group: Group) -> list[Group]:
    """Gloo tells messages apart by tag; elsewhere they are told apart by channel, and a channel is a group."""
    if dist.get_backend(group) == "gloo":
        return [group] * 4
    members = dist.get_process_group_ranks(group)
    return [dist.new_group(members, use_local_synchronization=True) for _ in range(4)]
