"""The running sequences of one step, as the attention of either kind wants them: tables of pages, or pages to walk."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tidemill.batch import Array
from tidemill.models.upload import upload
from tidemill.rollout.native.batch.scheduler import Scheduler
from tidemill.rollout.native.pages.attention import Walk

# A shared page is listed once per this many owners: wider entries waste work when groups are uneven.
OWNERS_PER_ENTRY = 8
# Below this share of pages in use, listing them costs less than walking over the unused ones between.
DENSE_SHARE = 0.6
# A start beyond every length: nothing of the page is seen.
NOWHERE = 1 << 40


class RunningRows:
    """Implements `attention.DecodeRows`. One object serves all steps: what only changes when sequences come and go is
    worked out again only then."""

    def __init__(self, scheduler: Scheduler, device: torch.device) -> None:
        self.scheduler = scheduler
        self.device = device
        self.table = scheduler.slots.table
        self.count = 0
        self.slot = self.length = np.zeros(0, np.int64)
        self._walks: list[Walk] | None = None
        self._lengths: Tensor | None = None
        self._tables: tuple[Tensor, Tensor] | None = None
        self._shared: Walk | None = None

    def of(self, slot: Array, length: Array) -> RunningRows:
        """The rows of the next pass: their slots, and how many tokens each sees."""
        self.count, self.slot, self.length = len(slot), slot, length
        self._walks = self._lengths = self._tables = None
        return self

    @property
    def lengths(self) -> Tensor:
        if self._lengths is None:
            self._lengths = self._tensor(self.length)
        return self._lengths

    @property
    def walks(self) -> list[Walk]:
        """Every (page, owner) pair: own pages in storage order, shared ones packed."""
        if self._walks is None:
            self._walks = [*self._own_pages(), *self._shared_pages()]
            self.scheduler.changed = False
        return self._walks

    @property
    def whole_tables(self) -> tuple[Tensor, Tensor]:
        if self._tables is None:
            pages = -(-int(self.length.max()) // self.scheduler.pool.page_size)
            table = np.ascontiguousarray(self.table[self.slot, :pages], np.int32)
            self._tables = self._tensor(table), self._tensor(self.length.astype(np.int32))
        return self._tables

    def _own_pages(self) -> list[Walk]:
        slots = self.scheduler.slots
        row_of = np.zeros(len(slots.active), np.int64)
        row_of[self.slot] = np.arange(self.count)
        high = self.scheduler.pool.high()
        slot = slots.page_slot[:high]
        owned = slot >= 0
        if not owned.any():
            return []
        if owned.sum() >= DENSE_SHARE * high:
            owner = np.where(owned, row_of[slot], 0)
            start = np.where(owned, slots.page_start[:high], NOWHERE)
            return [Walk(high, self._tensor(owner).view(-1, 1), self._tensor(start).view(-1, 1))]
        pages = np.flatnonzero(owned)
        owner, start = row_of[slot[pages]], slots.page_start[pages]
        return [Walk(self._tensor(pages), self._tensor(owner).view(-1, 1), self._tensor(start).view(-1, 1))]

    def _shared_pages(self) -> list[Walk]:
        slots = self.scheduler.slots
        shared = slots.shared[self.slot]
        if not shared.any():
            return []
        if self.scheduler.changed or self._shared is None:
            row, place = np.nonzero(np.arange(shared.max()) < shared[:, None])
            pages, start = slots.table[self.slot[row], place], place * slots.page_size
            self._shared = pack_owners(pages, row, start, self.device)
        return [self._shared]

    def _tensor(self, array: Array) -> Tensor:
        return upload(array, self.device, array.dtype)


def pack_owners(pages: Array, rows: Array, start: Array, device: torch.device) -> Walk:
    """Pairs (page, owning row) as entries of up to `OWNERS_PER_ENTRY` owners."""
    order = np.argsort(pages, kind="stable")
    pages, rows, start = pages[order], rows[order], start[order]
    first = np.flatnonzero(np.diff(pages, prepend=-1))
    run = np.diff(first, append=len(pages))
    rank = np.arange(len(pages)) - np.repeat(first, run)
    width = int(min(run.max(), OWNERS_PER_ENTRY))
    new_entry = rank % width == 0
    entry = np.cumsum(new_entry) - 1
    owners = np.zeros((entry[-1] + 1, width), np.int64)
    begin = np.full(owners.shape, NOWHERE, np.int64)
    owners[entry, rank % width] = rows
    begin[entry, rank % width] = start
    return Walk(*(upload(array, device) for array in (pages[new_entry], owners, begin)))
