"""Ready queues: which units may be taken next, in arrival order, at a cost proportional to what is taken, not to what
is stored. A unit (a row, or a whole group) is ready while its ticket is not 0. Queues hold (unit, ticket) pairs; an
entry whose ticket is no longer the unit's is dead, and is removed once a scan passes over it. So the same units can be
kept in several orders (arrival, by version, by tag) without ever deleting from the middle."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Key = Callable[[Ints], npt.NDArray[Any]]  # of units: the value that selects their queue in an order

FIRST_TICKET = 1 << 40  # given-back units get tickets below, new ones above: both orders stay positive
EMPTY = np.empty(0, np.int64)
QUEUES = 64  # queues of one order before empty ones are removed


class Queue:
    """Units in order; `is_alive(units, tickets)` says which entries are valid."""

    __slots__ = ("_head", "_is_alive", "_tail", "_tickets", "_units")

    def __init__(self, is_alive: Callable[[Ints, Ints], npt.NDArray[np.bool_]]) -> None:
        self._is_alive = is_alive
        self._units = np.empty(64, np.int64)
        self._tickets = np.empty(64, np.int64)
        self._head = self._tail = 16

    def push(self, units: Ints, tickets: Ints) -> None:
        n = len(units)
        if self._tail + n > len(self._units):
            self._rebuild(n)
        self._units[self._tail : self._tail + n] = units
        self._tickets[self._tail : self._tail + n] = tickets
        self._tail += n

    def push_front(self, units: Ints, tickets: Ints) -> None:
        n = len(units)
        if n > self._head:
            self._rebuild(n)
        self._head -= n
        self._units[self._head : self._head + n] = units
        self._tickets[self._head : self._head + n] = tickets

    def peek(self, k: int) -> Ints:
        """Return the first `k` live units (or fewer). Dead entries on the way are removed."""
        window = k + 16
        while True:
            end = min(self._head + window, self._tail)
            units, tickets = self._units[self._head : end], self._tickets[self._head : end]
            alive = self._is_alive(units, tickets)
            found = int(np.count_nonzero(alive))
            if found < len(units):
                units, tickets = units[alive], tickets[alive]
                self._head = end - found
                self._units[self._head : end] = units
                self._tickets[self._head : end] = tickets
            if found >= k or end == self._tail:
                return units[:k].copy()
            window = 2 * window

    def _rebuild(self, room: int) -> None:
        """Remove dead entries and make room on both ends; doubling keeps the cost per entry constant."""
        units, tickets = self._units[self._head : self._tail], self._tickets[self._head : self._tail]
        alive = self._is_alive(units, tickets)
        units, tickets = units[alive], tickets[alive]
        n = len(units)
        margin = max(32, room, n // 2)
        self._head, self._tail = margin, margin + n
        self._units, self._tickets = np.empty(n + 2 * margin, np.int64), np.empty(n + 2 * margin, np.int64)
        self._units[self._head : self._tail] = units
        self._tickets[self._head : self._tail] = tickets


class ReadyQueue:
    """All ready units of one stage. Orders other than arrival are kept from their first use on."""

    __slots__ = (
        "_arrival",
        "_back",
        "_changing",
        "_front",
        "_has_rekeyed",
        "_keys",
        "_orders",
        "_sweep_at",
        "count",
        "tickets",
    )

    def __init__(self, keys: dict[str, Key], changing: Collection[str] = ()) -> None:
        """`changing`: names of keys that may change while a unit is ready (`rekey` tells)."""
        self._changing = changing
        self.tickets = np.zeros(64, np.int64)
        self.count = 0
        self._keys = keys
        self._arrival = Queue(lambda units, tickets: self.tickets[units] == tickets)
        self._orders: dict[str, dict[int, Queue]] = {}
        self._front = self._back = FIRST_TICKET
        self._has_rekeyed = False
        self._sweep_at = QUEUES

    def ensure(self, units: int) -> None:
        """Make room for units numbered below this, before they become ready."""
        if units > len(self.tickets):
            grown = np.zeros(max(units, 2 * len(self.tickets)), np.int64)
            grown[: len(self.tickets)] = self.tickets
            self.tickets = grown

    def has(self, units: Ints) -> npt.NDArray[np.bool_]:
        waiting: npt.NDArray[np.bool_] = self.tickets[units] != 0
        return waiting

    def has_one(self, unit: int) -> bool:
        return bool(self.tickets[unit] != 0)

    @property
    def has_orders(self) -> bool:
        """Whether units are kept in an order other than arrival, which `rekey` must follow."""
        return bool(self._orders) and self.count > 0

    def add(self, units: Ints, front: bool = False) -> None:
        """Make `units` ready (none of them is yet): behind all others or, when given back, before them."""
        n = len(units)
        if not n:
            return
        if front:
            self._front -= n
            tickets = np.arange(self._front, self._front + n)
            self._arrival.push_front(units, tickets)
        else:
            tickets = np.arange(self._back + 1, self._back + 1 + n)
            self._back += n
            self._arrival.push(units, tickets)
        self.tickets[units] = tickets
        self.count += n
        for name in self._orders:
            self._index(name, units, tickets, front)

    def remove(self, units: Ints) -> None:
        if self.count:
            self.count -= int(np.count_nonzero(self.tickets[units]))
            self.tickets[units] = 0

    def take_out(self, units: Ints) -> None:
        """Like `remove`, for units that are known to be ready, each named once."""
        self.count -= len(units)
        self.tickets[units] = 0

    def rekey(self, units: Ints) -> None:
        """Move ready units to the queue of their new key, after a key (such as the version) changed."""
        if not self.has_orders:
            return
        units = units[self.has(units)]
        if len(units):
            self._has_rekeyed = True
            for name in self._orders:
                self._index(name, units, self.tickets[units], False)

    def first(self, k: int) -> Ints:
        return self._arrival.peek(k)

    def first_of(self, name: str, key: int, k: int) -> Ints:
        self._order(name)
        queue = self._orders[name].get(key)
        if queue is None:
            return EMPTY
        units = queue.peek(k)
        if self._has_rekeyed:  # a key that changed and changed back leaves two entries
            units = np.fromiter(dict.fromkeys(units.tolist()), np.int64)
        return units

    def known_keys(self, name: str) -> list[int]:
        """Return keys that have ready units, ascending."""
        self._order(name)
        queues = self._orders[name]
        for key in [key for key, queue in queues.items() if not len(queue.peek(1))]:
            del queues[key]
        return sorted(queues)

    def all(self) -> Ints:
        return self._arrival.peek(self.count)

    def _order(self, name: str) -> None:
        if name not in self._orders:
            self._orders[name] = {}
            units = self.all()
            self._index(name, units, self.tickets[units], False)

    def _index(self, name: str, units: Ints, tickets: Ints, front: bool) -> None:
        key_of, queues = self._keys[name], self._orders[name]
        keys = key_of(units)
        for key in set(keys.tolist()):
            if key not in queues:
                if len(queues) >= self._sweep_at:  # such as tags of past steps
                    self._sweep_at = 2 * len(self.known_keys(name)) + QUEUES
                queues[key] = self._queue(name, key)
            mine = keys == key
            (queues[key].push_front if front else queues[key].push)(units[mine], tickets[mine])

    def _queue(self, name: str, key: int) -> Queue:
        if name not in self._changing:
            return Queue(lambda units, tickets: self.tickets[units] == tickets)
        key_of = self._keys[name]
        return Queue(lambda units, tickets: (self.tickets[units] == tickets) & (key_of(units) == key))
