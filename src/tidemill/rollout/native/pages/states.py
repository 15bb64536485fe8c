"""The states of recurrent layers beside the pages: one place per slot, and one in hand for each trunk being read.

A state is what a layer knows of all tokens before, so it cannot be shared as pages are: every sample of a group gets a
copy of the one after its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from tidemill.batch import Array
from tidemill.device.mapped import MappedMemory
from tidemill.models.recurrent.chunked import layer, on_device
from tidemill.models.recurrent.chunked.plan import NOTHING, RowPlan, Segment
from tidemill.models.recurrent.mixers import Call, Made, joined
from tidemill.models.recurrent.states import Key, State

Place = tuple[int, Key]  # of which mixer, and which state of it
Hand = dict[Place, Tensor]  # of one sequence


class StateStore:
    """(slots + 1, …) of every state; captured decoding writes its padding to the last slot. Shapes are learnt from the
    first sequence, because only the model knows them. With `memory`, captured graphs may hold the addresses."""

    memory: MappedMemory | None = None

    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots, self.device = slots + 1, device
        self.held: dict[Place, Tensor] = {}

    def put(self, slot: int, hand: Hand) -> None:
        for place, state in hand.items():
            self.make_room(place, state.shape, state.dtype)
            self.held[place][slot] = state

    def make_room(self, place: Place, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """For a state of this shape of every slot, unless there is some already."""
        if place not in self.held:
            self.held[place] = self.zeros((self.slots, *shape), dtype)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """In memory whose addresses stay, where there is such memory."""
        if self.memory is not None:
            return self.memory.zeros(shape, dtype=dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def take(self, slot: int) -> Hand:
        return {place: held[slot].clone() for place, held in self.held.items()}

    def of(self, mixer: int, slots: Tensor) -> State:
        """(rows, …) of one mixer's states."""
        return {key: held.index_select(0, slots) for (own, key), held in self.held.items() if own == mixer}

    def write(self, mixer: int, slots: Tensor, states: State) -> None:
        for key, state in states.items():
            self.held[mixer, key].index_copy_(0, slots, state)

    def clear(self) -> None:
        """Give the memory back. Whoever wrote to it has been waited for; pages in the same memory give it back too."""
        if self.memory is None:
            self.held.clear()

    @property
    def nbytes(self) -> int:
        if self.memory is not None and self.memory.is_released:
            return 0
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
        self.store, self.rows, self.stretches = store, len(slots), stretches
        self.slots = torch.from_numpy(slots).to(store.device)
        self.alike: dict[tuple[int, bool], list[Stretch]] = {}
        for one in stretches:
            self.alike.setdefault((one.last - one.first, bool(one.hand)), []).append(one)
        order = [*range(self.rows), *(i for some in self.alike.values() for s in some for i in range(s.first, s.last))]
        self.restore = torch.argsort(torch.tensor(order, device=store.device))

    def recur(self, call: Call) -> Any:
        if on_device.is_chunked(call.module, self.store.device):
            return self._in_chunks(call)
        made = [self._decode(call)] if self.rows else []
        made += [self._read(call, some) for some in self.alike.values()]
        return joined(made, lambda parts: torch.cat(parts).index_select(0, self.restore)[None])

    def _in_chunks(self, call: Call) -> Tensor:
        """Rows in their slots, then all stretches as one packed row."""
        module, own, made = call.module, call.number, []
        if self.rows:
            held = self.store.held[own, layer.CONV_STATE], self.store.held[own, layer.DELTA_STATE]
            made.append(layer.step(module, call.hidden[: self.rows], *held, self.slots))
        if self.stretches:
            given = {}
            for key in (layer.CONV_STATE, layer.DELTA_STATE) if self._begun else ():
                given[key] = torch.stack([one.hand[own, key] for one in self._begun])
            out, ends = layer.forward(module, call.hidden[self.rows :], self._row, given or None)
            made.append(out)
            for i, one in enumerate(self.stretches):
                one.hand.update({(own, key): state[i].clone() for key, state in ends.items()})
        return torch.cat(made)[None]

    @cached_property
    def _begun(self) -> list[Stretch]:
        """Those that go on from a state, as it was when the pass began."""
        return [one for (_, has_state), some in self.alike.items() if has_state for one in some]

    @cached_property
    def _row(self) -> RowPlan:
        given = {id(one): i for i, one in enumerate(self._begun)}
        return RowPlan(
            [Segment(one.last - one.first, given=given.get(id(one), NOTHING)) for one in self.stretches],
            self.store.device,
        )

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
            out, begins = call.on(partial(_between, some, a, b), begins)
            made.append(Made(out, (len(some), b - a), lambda x: x))
        for i, one in enumerate(some):
            one.hand.update({(own, key): state[i].clone() for key, state in begins.items()})
        whole = made[0].out if len(made) == 1 else joined(made, lambda parts: torch.cat(parts, 1))
        return Made(whole, (len(some), length), partial(torch.flatten, start_dim=0, end_dim=1))


def _between(some: Sequence[Stretch], a: int, b: int, x: Tensor) -> Tensor:
    """Tokens a to b of each stretch: (stretches, b - a, …)."""
    return torch.stack([x[one.first + a : one.first + b] for one in some])
