"""Groups: the rows of one prompt, counted so that a stage of scope `group` gets them whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tidemill.errors import DockError


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

    def join(self, key: int, slot: int, size: int | None) -> None:
        group = self._by_key.get(key)
        if group is None:
            group = self._new(key)
        group.size = group.size or size or self.size or 0
        self.has_unsized = self.has_unsized or not group.size
        group.members.append(slot)

    def left(self, key: int, slot: int, dropped: bool) -> None:
        """Remove a row that was dropped or has passed all stages; the last one removes the group."""
        group = self._by_key[key]
        group.members.remove(slot)
        if dropped:
            group.dropped += 1
        else:
            group.left += 1
        if not group.members and group.seen >= group.size:
            self._delete(group)

    def forget(self, key: int, slot: int) -> None:
        """Remove a row that is expected again."""
        group = self._by_key[key]
        group.members.remove(slot)
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
        handle = self._free.pop()
        group = GroupCount(key, handle, 0, [0] * self.stages, [0] * self.stages)
        self._by_key[key] = self._by_handle[handle] = group
        return group

    def dump(self) -> list[tuple[int, int, int, int, list[int]]]:
        return [(g.key, g.size, g.dropped, g.left, g.consumed) for g in self._by_key.values()]

    def load(self, dumped: Iterable[tuple[int, int, int, int, list[int]]]) -> None:
        """Restore groups without members: these join as their rows are loaded."""
        for key, size, dropped, left, consumed in dumped:
            group = self._new(key)
            group.size, group.dropped, group.left, group.consumed = size, dropped, left, list(consumed)
