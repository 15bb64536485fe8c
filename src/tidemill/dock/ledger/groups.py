"""Groups: the rows of one prompt, counted so that a stage of scope `group` gets them whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tidemill.errors import DockError

Ints = npt.NDArray[np.int64]
NOBODY = -1  # no member is here


@dataclass(slots=True)
class GroupCount:
    """A group is complete for group stage k when `ready[k] == expected(k)`: dropped rows, and rows that have passed
    that stage, are no longer expected."""

    key: int
    handle: int  # small number of the group in ready queues
    size: int  # 0: not known yet
    ready: list[int]  # rows ready, per stage of scope `group`
    consumed: list[int]  # rows that stage has consumed
    members: list[int] = field(default_factory=list)  # slots of rows that are still here
    dropped: int = 0
    left: int = 0  # rows that have passed all stages

    @property
    def seen(self) -> int:
        return len(self.members) + self.dropped + self.left

    def is_complete(self, k: int) -> bool:
        return 0 < self.ready[k] == self.size - self.dropped - self.consumed[k]


class Groups:
    def __init__(self, stages: int, size: int | None) -> None:
        self.stages = stages  # of scope `group`
        self.size = size  # size of groups whose rows do not say
        self.has_unsized = False  # a group's size is not known yet
        self._by_key: dict[int, GroupCount] = {}
        self._by_handle: list[GroupCount | None] = []
        self._free: list[int] = []
        self.rows_here = np.zeros(64, np.int64)  # by handle: members, and the slot of the first of them
        self.first_slot = np.full(64, NOBODY, np.int64)

    def __getitem__(self, key: int) -> GroupCount:
        return self._by_key[key]

    def get(self, handle: int) -> GroupCount | None:
        return self._by_handle[handle]

    def at(self, handles: Iterable[int]) -> list[GroupCount]:
        groups = [self._by_handle[handle] for handle in handles]
        return [group for group in groups if group is not None]

    def check_room(self, keys: list[int], sizes: list[int] | None) -> None:
        """Refuse more rows than a group's size, before anything has changed."""
        coming: dict[int, int] = {}
        for i, key in enumerate(keys):
            coming[key] = coming.get(key, 0) + 1
            group = self._by_key.get(key)
            size = group.size if group and group.size else sizes[i] if sizes else self.size
            if size and coming[key] + (group.seen if group else 0) > size:
                raise DockError(f"group {key} has {size} rows, but more were put", "give each prompt its own group id")

    def join(self, keys: Sequence[int], slots: Sequence[int], sizes: Sequence[int] | None) -> None:
        """Add rows, each with the key of its group."""
        joined: dict[int, GroupCount] = {}
        for i, key in enumerate(keys):
            group = joined.get(key)
            if group is None:
                group = joined[key] = self._by_key.get(key) or self._new(key)
            group.size = group.size or (sizes[i] if sizes else 0) or self.size or 0
            self.has_unsized = self.has_unsized or not group.size
            group.members.append(slots[i])
        for group in joined.values():
            self._note(group)

    def _note(self, group: GroupCount) -> None:
        members = group.members
        self.rows_here[group.handle] = len(members)
        self.first_slot[group.handle] = members[0] if members else NOBODY

    def left(self, key: int, slot: int) -> None:
        """Remove a row that was dropped; the last one removes the group."""
        group = self._by_key[key]
        group.members.remove(slot)
        group.dropped += 1
        self._note(group)
        if not group.members and group.seen >= group.size:
            self._delete(group)

    def passed(self, keys: Sequence[int], slots: Sequence[int]) -> None:
        """Remove rows that have passed all stages; the last one of a group removes it."""
        of_group: dict[int, list[int]] = {}
        for key, slot in zip(keys, slots):
            of_group.setdefault(key, []).append(slot)
        for key, gone in of_group.items():
            group = self._by_key[key]
            if gone == group.members:  # the usual case: all at once
                group.members = []
            else:
                leaving = set(gone)
                group.members = [slot for slot in group.members if slot not in leaving]
            group.left += len(gone)
            self._note(group)
            if not group.members and group.seen >= group.size:
                self._delete(group)

    def forget(self, key: int, slot: int) -> None:
        """Remove a row that is expected again."""
        group = self._by_key[key]
        group.members.remove(slot)
        self._note(group)
        if not group.members and group.seen == 0:
            self._delete(group)

    def learn_size(self, size: int) -> list[GroupCount]:
        """Set the size of groups that did not say; return these groups."""
        self.size = size
        self.has_unsized = False
        news = [group for group in self._by_key.values() if not group.size]
        for group in news:
            group.size = size
        return news

    def _delete(self, group: GroupCount) -> None:
        del self._by_key[group.key]
        self._by_handle[group.handle] = None
        self._free.append(group.handle)

    def _new(self, key: int) -> GroupCount:
        if not self._free:
            self._free.append(len(self._by_handle))
            self._by_handle.append(None)
            if len(self._by_handle) > len(self.rows_here):
                self._double()
        handle = self._free.pop()
        group = GroupCount(key, handle, 0, [0] * self.stages, [0] * self.stages)
        self._by_key[key] = self._by_handle[handle] = group
        return group

    def _double(self) -> None:
        n = len(self.rows_here)
        self.rows_here = np.concatenate([self.rows_here, np.zeros(n, np.int64)])
        self.first_slot = np.concatenate([self.first_slot, np.full(n, NOBODY, np.int64)])

    def dump(self) -> list[tuple[int, int, int, int, list[int]]]:
        return [(g.key, g.size, g.dropped, g.left, g.consumed) for g in self._by_key.values()]

    def load(self, dumped: Iterable[tuple[int, int, int, int, list[int]]]) -> None:
        """Restore groups without members: these join as their rows are loaded."""
        for key, size, dropped, left, consumed in dumped:
            group = self._new(key)
            group.size, group.dropped, group.left, group.consumed = size, dropped, left, list(consumed)
