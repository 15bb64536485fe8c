"""The states of recurrent layers beside the pages: one place per slot, and one in hand for each trunk being read.

A state is what a layer knows of all tokens before, so it cannot be shared as pages are: every sample of a group gets a
copy of the one after its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tidemill.batch import Array
from tidemill.models.recurrent.mixers import Call, Made, joined
from tidemill.models.recurrent.states import Key, State

Place = tuple[int, Key]  # of which mixer, and which state of it
Hand = dict[Place, Tensor]  # of one sequence


class StateStore:
    """(slots + 1, …) of every state; captured decoding writes its padding to the last slot. Shapes are learnt from the
    first sequence, because only the model knows them."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots, self.device = slots + 1, device
        self.held: dict[Place, Tensor] = {}

    def put(self, slot: int, hand: Hand) -> None:
        for place, state in hand.items():
            if place not in self.held:
                self.held[place] = state.new_zeros((self.slots, *state.shape))
            self.held[place][slot] = state

    def take(self, slot: int) -> Hand:
        return {place: held[slot].clone() for place, held in self.held.items()}

    def of(self, mixer: int, slots: Tensor) -> State:
        """(rows, …) of one mixer's states."""
        return {key: held.index_select(0, slots) for (own, key), held in self.held.items() if own == mixer}

    def write(self, mixer: int, slots: Tensor, states: State) -> None:
        for key, state in states.items():
            self.held[mixer, key].index_copy_(0, slots, state)

    def clear(self) -> None:
        """Give the memory back. Whoever wrote to it has been waited for."""
        self.held.clear()

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.held.values())


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens of a trunk: `first:last` of the pass. `hand` is where its states are, and come to be."""

    first: int
    last: int
    hand: Hand


class PassStates:
    """How states go in one pass: one token of every row, whose states lie in slots, then stretches of trunks."""

    def __init__(self, store: StateStore, slots: Array, stretches: Sequence[Stretch]) -> None:
        self.store, self.rows = store, len(slots)
        self.slots = torch.from_numpy(slots).to(store.device)
        self.alike: dict[tuple[int, bool], list[Stretch]] = {}
        for one in stretches:
            self.alike.setdefault((one.last - one.first, bool(one.hand)), []).append(one)
        order = [*range(self.rows), *(i for some in self.alike.values() for s in some for i in range(s.first, s.last))]
        self.restore = torch.argsort(torch.tensor(order, device=store.device))

    def recur(self, call: Call) -> Any:
        made = [self._decode(call)] if self.rows else []
        made += [self._read(call, some) for some in self.alike.values()]
        return joined(made, lambda parts: torch.cat(parts).index_select(0, self.restore)[None])

    def _decode(self, call: Call) -> Made:
        states = self.store.of(call.number, self.slots)
        out, ends = call.on(lambda x: x[: self.rows].unsqueeze(1), states)
        self.store.write(call.number, self.slots, ends)
        return Made(out, (self.rows, 1), partial(torch.squeeze, dim=1))

    def _read(self, call: Call, some: list[Stretch]) -> Made:
        own = call.number
        keys = [key for mixer, key in some[0].hand if mixer == own]
        begins = {key: torch.stack([one.hand[own, key] for one in some]) for key in keys}
        length = some[0].last - some[0].first
        steps = [(0, length)] if call.goes_on or not begins else [(at, at + 1) for at in range(length)]
        made = []
        for a, b in steps:
            out, begins = call.on(lambda x, a=a, b=b: torch.stack([x[s.first + a : s.first + b] for s in some]), begins)
            made.append(Made(out, (len(some), b - a), lambda x: x))
        for i, one in enumerate(some):
            one.hand.update({(own, key): state[i].clone() for key, state in begins.items()})
        whole = made[0].out if len(made) == 1 else joined(made, lambda parts: torch.cat(parts, 1))
        return Made(whole, (len(some), length), partial(torch.flatten, start_dim=0, end_dim=1))
