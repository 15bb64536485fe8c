"""Experts that lie on several ranks: a token's row travels once for each expert it chose, to the rank that has it (an
all-to-all there, the grouped products, an all-to-all back), and the rows are weighed and added up where they came from.

Ranks that share a token (those of tensor parallelism) each send only what goes to experts of their own share; their
parts are summed as those of any block are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tidemill.models.mixture import experts


class ExpertLink(Protocol):
    """The ranks that exchange rows."""

    @property
    def size(self) -> int: ...

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """send[r] rows to rank r, receive[r] rows from it, in the order of ranks."""


class Exchange(Protocol):
    """`ExpertLink.all_to_all`, differentiable where it has to be."""

    def __call__(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], over: Any) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """Which experts lie where: `count` on each rank of `over` and of those that share its tokens, in that order of
    cutting."""

    over: ExpertLink
    count: int
    tp_rank: int = 0
    tp_size: int = 1

    def own(self, index: Tensor) -> Tensor:
        """Of chosen experts: whether this one of the ranks that share tokens has to see to them."""
        return index // self.count % self.tp_size == self.tp_rank

    def home(self, index: Tensor) -> Tensor:
        """The rank of `over` that has an expert."""
        return index // (self.count * self.tp_size)

    def local(self, index: Tensor) -> Tensor:
        """An expert's number on its rank."""
        return index % self.count


def forward(
    module: Any, hidden: Tensor, index: Tensor, weights: Tensor, place: ExpertPlace, exchange: Exchange
) -> Tensor:
    """As `models.experts.forward`, with this rank's tokens and experts that lie on all ranks of `place`."""
    k = index.shape[1]
    chosen = index.reshape(-1)
    rows = torch.nonzero(place.own(chosen))[:, 0] if place.tp_size > 1 else None
    wanted = chosen if rows is None else chosen[rows]
    order = torch.argsort(wanted, stable=True)  # by expert is by rank too
    pairs = order if rows is None else rows[order]  # (sent,) token · k + choice
    sorted_rows = hidden.index_select(0, pairs // k)
    if place.over.size == 1:
        made = experts.gated(module, sorted_rows, experts.ends_of(place.local(wanted), place.count))
    else:
        sent, came = _counts(wanted, place)
        going, coming = sent.sum(1).tolist(), came.sum(1).tolist()
        arrived = exchange(sorted_rows, going, coming, place.over)
        made = exchange(_own_experts(module, arrived, came), coming, going, place.over)
    made = made * weights.reshape(-1).index_select(0, pairs).unsqueeze(-1)
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
