"""Beginnings that can be gone on from in a model with states: where earlier sequences ended, and with which states.

Pages can be joined to any beginning, a state only to the very tokens that it is of. So each entry is one whole earlier
sequence: the next turn of a conversation goes on from the end of the turn before. Full pages stay with `PrefixIndex`;
an entry keeps the states and the last page, if that is not full.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from dataclasses import dataclass

from tidemill.batch import Array
from tidemill.rollout.native.pages.cache import PagePool
from tidemill.rollout.native.pages.states import Hand


@dataclass(frozen=True, slots=True)
class Entry:
    length: int  # tokens
    tail: int | None  # the page that is not full
    hand: Hand


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a sequence can go on from. `pages` are held once more for it; `tail` is to be copied into its own page."""

    length: int
    pages: list[int]
    tail: int | None
    hand: Hand


class StatePrefixes:
    """The latest `most` of them. A tail is held until its entry is forgotten."""

    def __init__(self, pool: PagePool, most: int) -> None:
        self.pool, self.most = pool, most
        self.entries: OrderedDict[bytes, Entry] = OrderedDict()
        self.lengths: Counter[int] = Counter()

    def remember(self, tokens: Array, pages: list[int], hand: Hand) -> None:
        """`hand` is after `tokens`, which lie in `pages`."""
        length, size = len(tokens), self.pool.page_size
        key = _digests(tokens, [length])[0]
        if key in self.entries:
            self.entries.move_to_end(key)
            return
        tail = pages[length // size] if length % size else None
        if tail is not None:
            self.pool.hold(tail)
        self.entries[key] = Entry(length, tail, hand)
        self.lengths[length] += 1
        while len(self.entries) > self.most:
            self.forget_oldest()

    def find(self, tokens: Array) -> Beginning | None:
        """The longest known one. The last token is always left out: its logits must be computed."""
        lengths = sorted(n for n in self.lengths if n < len(tokens))
        for length, key in reversed(list(zip(lengths, _digests(tokens, lengths)))):
            entry = self.entries.get(key)
            if entry is None:
                continue
            pages = self.pool.index.find(tokens[: length + 1])
            if len(pages) < length // self.pool.page_size:  # some were forgotten
                for page in reversed(pages):
                    self.pool.drop(page)
                self._forget(key)
                continue
            self.entries.move_to_end(key)
            return Beginning(length, pages, entry.tail, entry.hand)
        return None

    def forget_oldest(self) -> bool:
        """False where there is none."""
        if not self.entries:
            return False
        self._forget(next(iter(self.entries)))
        return True

    def forget_all(self) -> None:
        while self.forget_oldest():
            pass

    def _forget(self, key: bytes) -> None:
        entry = self.entries.pop(key)
        self.lengths[entry.length] -= 1
        if not self.lengths[entry.length]:
            del self.lengths[entry.length]
        if entry.tail is not None:
            self.pool.drop(entry.tail)


def _digests(tokens: Array, lengths: list[int]) -> list[bytes]:
    """Of the beginnings of these lengths, which are sorted."""
    digest, found, at = hashlib.blake2b(digest_size=16), list[bytes](), 0
    for length in lengths:
        digest.update(tokens[at:length].tobytes())
        found.append(digest.digest())
        at = length
    return found
