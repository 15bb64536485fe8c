"""The bytes of pages in host memory: pinned where there is a device to copy from, with copies on a stream of their own.

A row holds one page of every layer side by side, so that many pages are few large copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tidemill.models.upload import upload
from tidemill.rollout.native.pages.cache import PageStore, Part
from tidemill.rollout.native.pages.host import FromHost, Move, PageCopy, ToHost
from tidemill.rollout.native.pages.states import Hand, Place, StateStore

if TYPE_CHECKING:
    from tidemill.rollout.native.engine import NativeEngine

# Pinned memory is given out in powers of two. A slab of such a size wastes less than a row; slabs come as they are
# needed, and a small room has some too.
SLAB_BYTES, SLABS = 1 << 30, 8
STAGED_BYTES = 1 << 26  # copied at once, and twice as much of the device taken for it
STAGES = 2
ALIGNED = 16  # so that any type can be read from the beginning of a row

Name = TypeVar("Name", Part, Place)


@dataclass(frozen=True, slots=True)
class Span:
    """One page of a tensor, or one state, within a row or some rows."""

    first: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class HostRoom:
    """`nbytes` bounds all of it. Made after the first pass, when the store knows its layers and the states theirs."""

    def __init__(self, store: PageStore, states: StateStore | None, nbytes: int) -> None:
        self.store, self.states = store, states
        self.device = store.device
        self.parts, used = _spans({part: held[0] for part, held in store.parts().items()})
        self.row_bytes = -(-used // ALIGNED) * ALIGNED
        states_of = {} if states is None else {place: held[0] for place, held in states.held.items()}
        self.state_parts, self.state_bytes = _spans(states_of)
        self.state_rows = -(-self.state_bytes // self.row_bytes)
        slab = max(min(SLAB_BYTES, 1 << max(nbytes // SLABS, 1).bit_length() - 1), self.row_bytes)
        self.rows_per_slab = slab // self.row_bytes
        self.rows = nbytes // slab * self.rows_per_slab
        self.slabs: dict[int, Tensor] = {}
        self.bytes_out = self.bytes_in = 0  # copied, ever
        self.stream = None if self.device.type == "cpu" else torch.Stream(device=self.device)
        self._staged: deque[Any] = deque()  # events of copies that still read the device's memory

    @property
    def nbytes(self) -> int:
        """Taken so far."""
        return sum(slab.nbytes for slab in self.slabs.values())

    # To the host

    def put(self, move: ToHost) -> None:
        for rows, some in self._runs(move.rows):
            with _Staged(self, rows) as made:
                self._gather(made, move.pages[some])
        if move.state:
            assert self.states is not None
            self._put_states(move.state, self.states.take(move.slot) if move.slot >= 0 else move.hand)
        self.bytes_out += (len(move.rows) + len(move.state)) * self.row_bytes

    def _gather(self, into: Tensor, pages: list[int]) -> None:
        index, held = upload(pages, self.device), self.store.parts()
        for part, span in self.parts.items():
            found = held[part].index_select(0, index).reshape(len(pages), -1)
            into[:, span.first : span.first + span.nbytes] = found.view(torch.uint8)

    def _put_states(self, rows: list[int], hand: Hand) -> None:
        flat = torch.zeros(len(rows) * self.row_bytes, dtype=torch.uint8, device=self.device)
        for place, span in self.state_parts.items():
            flat[span.first : span.first + span.nbytes] = hand[place].reshape(-1).view(torch.uint8)
        for host, some in self._runs(rows):
            with _Staged(self, host) as made:
                made.copy_(flat.view(len(rows), -1)[some])

    # From the host

    def bring(self, move: FromHost) -> None:
        self.store.make_parts({part: (span.shape, span.dtype) for part, span in self.parts.items()})
        held = self.store.parts()
        for host, some in self._runs(move.rows):
            index, rows = upload(move.pages[some], self.device), self._fetched(host)
            for part, span in self.parts.items():
                own = rows[:, span.first : span.first + span.nbytes].contiguous().view(span.dtype)
                held[part].index_copy_(0, index, own.view(-1, *span.shape))
        if move.state:
            flat = torch.cat([self._fetched(host) for host, _ in self._runs(move.state)]).view(-1)
            for place, span in self.state_parts.items():
                own = flat[span.first : span.first + span.nbytes].clone().view(span.dtype)
                move.hand[place] = own.view(span.shape)
        self.bytes_in += (len(move.rows) + len(move.state)) * self.row_bytes

    def _fetched(self, host: Tensor) -> Tensor:
        """On the device, for whatever is asked of it next."""
        if self.stream is None:
            return host
        with self.stream:
            rows = host.to(self.device, non_blocking=True)
        now = torch.accelerator.current_stream(self.device)
        now.wait_stream(self.stream)
        rows.record_stream(now)
        self._bound()
        return rows

    def send(self, staged: Tensor, host: Tensor) -> None:
        """Copy what the device is making; its memory is free for others once that is done."""
        assert self.stream is not None
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self.stream:
            host.copy_(staged, non_blocking=True)
        staged.record_stream(self.stream)
        self._bound()

    def _bound(self) -> None:
        assert self.stream is not None
        self._staged.append(self.stream.record_event())
        if len(self._staged) > STAGES:
            self._staged.popleft().synchronize()

    def _runs(self, rows: Sequence[int]) -> Iterator[tuple[Tensor, slice]]:
        """Rows that lie side by side, some at once; and which of `rows` these are."""
        most, first = max(1, STAGED_BYTES // self.row_bytes), 0
        for at in range(1, len(rows) + 1):
            is_over = at == len(rows) or rows[at] != rows[at - 1] + 1 or rows[at] % self.rows_per_slab == 0
            if is_over or at - first == most:
                slab, begin = divmod(rows[first], self.rows_per_slab)
                yield self._slab(slab)[begin : begin + at - first], slice(first, at)
                first = at

    def _slab(self, number: int) -> Tensor:
        if number not in self.slabs:
            shape = self.rows_per_slab, self.row_bytes
            self.slabs[number] = torch.empty(shape, dtype=torch.uint8, pin_memory=self.stream is not None)
        return self.slabs[number]


def opened(engine: NativeEngine) -> HostRoom | None:
    """An engine's room, once it is known what a page takes; all ranks of an engine open theirs at the same step, and
    with as many rows: each decides by them what the others decide."""
    if not engine.host_bytes or not engine.passes or (engine.states is not None and not engine.states.held):
        return None
    room = HostRoom(engine.store, engine.states, engine.host_bytes)
    rows = room.rows if engine.links is None else engine.links.least(room.rows)
    engine.scheduler.host.open(rows, room.state_rows)
    return room


def counts(room: HostRoom | None) -> dict[str, int]:
    """By the names of metrics."""
    return {} if room is None else {"host_cache/out_bytes": room.bytes_out, "host_cache/in_bytes": room.bytes_in}


def carry_out(moves: Sequence[Move], store: PageStore, room: HostRoom | None) -> None:
    """In their order: a page that is copied away may be written to by the next move. Without a room all moves are
    copies within the store."""
    for move in moves:
        if isinstance(move, PageCopy):
            store.copy(move.source, move.target)
            continue
        assert room is not None
        if isinstance(move, ToHost):
            room.put(move)
        else:
            room.bring(move)


class _Staged:
    """Where rows are put together before they go to the host: there itself, unless a device has to copy them."""

    def __init__(self, room: HostRoom, host: Tensor) -> None:
        self.room, self.host = room, host
        self.made = host if room.stream is None else torch.empty_like(host, device=room.device, pin_memory=False)

    def __enter__(self) -> Tensor:
        return self.made

    def __exit__(self, *error: object) -> None:
        if self.room.stream is not None:
            self.room.send(self.made, self.host)


def _spans(held: dict[Name, Tensor]) -> tuple[dict[Name, Span], int]:
    """Side by side, the widest types first: each then begins where its type may."""
    found, at = dict[Name, Span](), 0
    for name, one in sorted(held.items(), key=lambda item: -item[1].element_size()):
        found[name] = Span(at, one.nbytes, tuple(one.shape), one.dtype)
        at += one.nbytes
    return found, at
