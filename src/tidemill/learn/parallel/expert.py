"""Expert parallel: each rank has some of a layer's experts; tokens go to the experts they chose and come back.

A token's row travels once for each expert it chose, to the rank that has it: an all-to-all there, the grouped products,
an all-to-all back, and the rows are weighed and added up where they came from. Ranks along ep have different tokens, so
an expert's gradient is complete over ep when the backward pass is.

With tensor parallelism too, every rank of a tensor-parallel group has all tokens and its own share of its ep rank's
experts: it sends only what goes to experts of that share, and the parts are summed as those of any block are.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tidemill.errors import ModelError
from tidemill.learn.parallel.collectives import MeshLink
from tidemill.learn.parallel.context import exchange
from tidemill.learn.parallel.cuts import Cuts, narrow, replace_parameter
from tidemill.models.mixture import experts
from tidemill.reshard.layouts.layout import Shard


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """Which experts lie where: `count` on each rank of `ep` and tensor-parallel rank, in that order of cutting."""

    over: MeshLink  # ep
    count: int
    tp_rank: int = 0
    tp_size: int = 1

    def own(self, index: Tensor) -> Tensor:
        """Of chosen experts: whether this tensor-parallel rank has to see to them."""
        return index // self.count % self.tp_size == self.tp_rank

    def home(self, index: Tensor) -> Tensor:
        """The ep rank that has an expert."""
        return index // (self.count * self.tp_size)

    def local(self, index: Tensor) -> Tensor:
        """An expert's number on its rank."""
        return index % self.count


def apply(model: Any, cuts: Cuts, over: MeshLink, tp_rank: int = 0, tp_size: int = 1) -> Cuts:
    """Cut the experts of `model` in place; tensor parallelism, if any, cuts what is left of them after."""
    names = {id(p): name for name, p in model.named_parameters()}
    done, found = dict(cuts), False
    for module in model.modules():
        if not experts.is_known(module):
            continue
        found = True
        total = module.gate_up_proj.shape[0]
        for name, old in list(module.named_parameters(recurse=False)):
            full = names[id(old)]
            new = replace_parameter(module, name, narrow(old, Shard(0), over.rank, over.size))
            names[id(new)] = full
            done[full] = replace(done[full], is_expert=True)
        module.place = ExpertPlace(over, total // over.size // tp_size, tp_rank, tp_size)
        module.forward = functools.partial(forward, module)
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no experts of a form that can be shared out", "set learn.parallel.ep to 1"
        )
    return done


def forward(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Do what `models.mixture.experts.forward` does, with this rank's tokens and experts spread over the ranks of the
    module's place."""
    place: ExpertPlace = module.place
    k = index.shape[1]
    chosen = index.reshape(-1)
    rows = torch.nonzero(place.own(chosen))[:, 0] if place.tp_size > 1 else None
    wanted = chosen if rows is None else chosen[rows]
    order = torch.argsort(wanted, stable=True)  # by expert is by rank too
    pairs = order if rows is None else rows[order]  # (sent,) token · k + choice
    sent, came = _counts(wanted, place)
    arrived = exchange(hidden.index_select(0, pairs // k), sent.sum(1).tolist(), came.sum(1).tolist(), place.over)
    made = exchange(
        _own_experts(module, arrived, came), came.sum(1).tolist(), sent.sum(1).tolist(), place.over
    ) * weights.reshape(-1).index_select(0, pairs).unsqueeze(-1)
    back = made.new_zeros((len(chosen), made.shape[1])).index_copy(0, pairs, made)
    return back.view(-1, k, made.shape[1]).sum(1).to(hidden.dtype)


def _counts(wanted: Tensor, place: ExpertPlace) -> tuple[Tensor, Tensor]:
    """(ranks, experts of each): rows that go from here to each expert, and that come from each rank to those here."""
    number = place.home(wanted) * place.count + place.local(wanted)
    ranks = place.over.size
    sent = torch.bincount(number, minlength=ranks * place.count)
    came = place.over.all_to_all(sent, [place.count] * ranks, [place.count] * ranks)
    both = torch.stack([sent, came]).view(2, ranks, place.count).cpu()  # one wait for the device: sizes are sizes
    return both[0], both[1]


def _own_experts(module: Any, arrived: Tensor, came: Tensor) -> Tensor:
    """Rows came rank by rank, each sorted by expert; the products want them by expert."""
    ranks, count = came.shape
    expert = torch.arange(count).repeat(ranks).repeat_interleave(came.reshape(-1)).to(arrived.device)
    order = torch.argsort(expert, stable=True)
    made = experts.gated(module, arrived.index_select(0, order), experts.ends_of(expert, count))
    return torch.empty_like(made).index_copy(0, order, made)
