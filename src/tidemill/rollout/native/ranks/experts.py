"""A mixture's experts over the ranks of an engine: which place a token's choice goes to, and how busy each is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tidemill.models.mixture import spread
from tidemill.rollout.native.ranks.balance import balanced, busiest
from tidemill.rollout.native.ranks.links import Links
from tidemill.rollout.native.ranks.share import Share


class SpreadExperts:
    """One layer's experts. `load`: how often each was chosen by the tokens of this replica."""

    def __init__(self, links: Links, experts: int, slots: Sequence[int], device: torch.device) -> None:
        self.links, self.experts = links, experts
        self.load = torch.zeros(experts, dtype=torch.int64, device=device)
        self.lay_out(slots)

    def lay_out(self, slots: Sequence[int]) -> None:
        """Take up which expert lies in each place."""
        homes: list[list[int]] = [[] for _ in range(self.experts)]
        for place, expert in enumerate(slots):
            homes[expert].append(place)
        most = max(map(len, homes))
        device = self.load.device
        self.homes = torch.tensor([[*own, *[own[0]] * (most - len(own))] for own in homes], device=device)
        self.copies = torch.tensor([len(own) for own in homes], device=device)
        self.place = self.links.expert_place(len(slots) // self.links.grid.ep)

    def forward(self, module: Any, h: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """h (tokens, width) → this rank's part of what the chosen experts make of it."""
        self.load.index_add_(0, chosen.reshape(-1), torch.ones_like(chosen.reshape(-1)))
        if self.homes.shape[1] == 1:
            slots = self.homes[:, 0][chosen]
        else:  # neighbours in a batch go to different copies
            turn = torch.arange(len(chosen), device=chosen.device).unsqueeze(1)
            slots = self.homes[chosen, (turn + chosen) % self.copies[chosen]]
        return spread.forward(module, h, slots, shares.to(h.dtype), self.place, _exchange)


def _exchange(rows: Tensor, send: Sequence[int], receive: Sequence[int], over: Any) -> Tensor:
    found: Tensor = over.all_to_all(rows, send, receive)
    return found


class ExpertBalance:
    """Decides where the experts of an engine lie next. All its ranks call these together."""

    def __init__(self, links: Links, share: Share, layers: dict[str, SpreadExperts]) -> None:
        self.links, self.share, self.layers = links, share, layers
        self._next: dict[str, tuple[int, ...]] | None = None

    def loads(self) -> dict[str, list[int]]:
        """How often each expert was chosen since the last time, by all tokens of the engine."""
        own = torch.zeros(len(self.share.slots), max(map(self._experts, self.share.slots)), dtype=torch.int64)
        for i, name in enumerate(self.share.slots):
            if name in self.layers:
                load = self.layers[name].load
                own[i, : len(load)] = load.cpu()
                load.zero_()
        told = self.links.sum_over_engine(own).tolist()
        return {name: loads[: self._experts(name)] for name, loads in zip(self.share.slots, told)}

    def plan(self) -> float:
        """Choose places by the loads since the last time. The layout is the new one from now on, what is served is the
        old one until `take_up`. Returns the load of the busiest part over an even one as it was, mean of layers."""
        parts, loads = self.links.grid.ep, self.loads()
        was = [busiest(loads[name], parts, now) for name, now in self.share.slots.items()]
        slots = {name: balanced(loads[name], parts, now) for name, now in self.share.slots.items()}
        if slots != self.share.slots:
            self.share.slots = self._next = slots
        return sum(was) / len(was)

    @property
    def is_due(self) -> bool:
        """Whether experts are to move."""
        return self._next is not None

    def _experts(self, name: str) -> int:
        return max(self.share.slots[name]) + 1

    def take_up(self) -> None:
        """Serve by the places that the weights have now been brought to."""
        if self._next is not None:
            for name, layer in self.layers.items():
                layer.lay_out(self._next[name])
            self._next = None


def names_of(model: Any, modules: Iterable[Any]) -> dict[int, str]:
    wanted = {id(m) for m in modules}
    return {id(m): name for name, m in model.named_modules() if id(m) in wanted}
