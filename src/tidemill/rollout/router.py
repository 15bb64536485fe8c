"""Which rollout replica makes which group. Decisions only: no input or output, no clock of its own.

A group goes whole to the replica with most room, so that its samples share the prompt's pages there. Replicas may join
and leave at any time: what a lost one had goes to others, first in line. A group that takes far longer than others is
issued once more, elsewhere, when nothing else waits for that room; whoever ends first wins, and the other is told to
stop. A sample draws with its own stream (seed, request, index): under the same weights a copy makes the same tokens.

It promises: a group is finished once; its samples are never split; nobody is given more than there is room for, but for
a group larger than a whole replica, which gets an empty one; groups are issued in the order they came.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

LATE_FACTOR = 3.0  # a straggler has taken this many times the median of finished groups
LEAST_FINISHED = 8  # before that there is no median worth the name
REMEMBERED = 256  # finished groups over which the median is taken
MOST_COPIES = 2


@dataclass(frozen=True, slots=True)
class Issue:
    """Send group `group` to `replica`, or (`is_stop`) tell it to stop making it."""

    replica: str
    group: int
    is_stop: bool = False


@dataclass(slots=True)
class _Replica:
    room: int  # samples it can make at once
    groups: dict[int, float] = field(default_factory=dict)  # since when it makes each
    is_leaving: bool = False  # ends what it has, and gets nothing new


@dataclass(slots=True)
class _Group:
    samples: int
    makers: list[str] = field(default_factory=list)


class Router:
    def __init__(self, late_factor: float = LATE_FACTOR) -> None:
        self.late_factor = late_factor
        self.replicas: dict[str, _Replica] = {}
        self.groups: dict[int, _Group] = {}  # not finished
        self.waiting: deque[int] = deque()
        self.reissued = 0  # stragglers
        self.returned = 0  # groups that a lost replica had
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)

    # -- replicas ----------------------------------------------------------------------------------------------------

    def join(self, replica: str, room: int) -> None:
        """A replica that can make `room` samples at once. Joining again is coming back empty."""
        if replica in self.replicas:
            self.lose(replica)
        self.replicas[replica] = _Replica(room)

    def leave(self, replica: str) -> None:
        """It ends what it has and gets nothing more; gone once that is done."""
        self.replicas[replica].is_leaving = True
        self._bury(replica)

    def lose(self, replica: str) -> list[int]:
        """It is gone with what it had: groups that nobody else makes are first in line again."""
        lost = self.replicas.pop(replica, None)
        if lost is None:
            return []
        orphans = []
        for group in lost.groups:
            makers = self.groups[group].makers
            makers.remove(replica)
            if not makers:
                orphans.append(group)
        self.waiting.extendleft(reversed(orphans))
        self.returned += len(orphans)
        return orphans

    def room(self, replica: str) -> int:
        """Samples that it could take now."""
        found = self.replicas[replica]
        return found.room - sum(self.groups[g].samples for g in found.groups)

    # -- groups ------------------------------------------------------------------------------------------------------

    def submit(self, group: int, samples: int) -> None:
        """A group to be made. Submitting one again that is not finished changes nothing."""
        if group not in self.groups:
            self.groups[group] = _Group(samples)
            self.waiting.append(group)

    def issue(self, now: float) -> list[Issue]:
        """What to send now: those that wait, in order, each to the replica with most room; then stragglers."""
        made: list[Issue] = []
        while self.waiting:
            replica = self._roomiest(self.groups[self.waiting[0]].samples)
            if replica is None:
                return made
            made.append(self._give(self.waiting.popleft(), replica, now))
        for group in self._late(now):
            replica = self._roomiest(self.groups[group].samples, but=self.groups[group].makers)
            if replica is not None:
                self.reissued += 1
                made.append(self._give(group, replica, now))
        return made

    def finished(self, replica: str, group: int, now: float) -> tuple[bool, list[Issue]]:
        """A group came back whole. Whether it counts (the first to end does), and who should stop making it."""
        if group not in self.groups or group not in self.replicas.get(replica, _Replica(0)).groups:
            return False, []
        self._seconds.append(now - self.replicas[replica].groups[group])
        makers = self.groups[group].makers
        for maker in makers:
            del self.replicas[maker].groups[group]
        del self.groups[group]
        for maker in makers:
            self._bury(maker)
        return True, [Issue(maker, group, is_stop=True) for maker in makers if maker != replica]

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _roomiest(self, samples: int, but: Iterable[str] = ()) -> str | None:
        """With most room, and enough; the one that joined first among equals."""
        able = [name for name, r in self.replicas.items() if not r.is_leaving and name not in but]
        best = max(able, key=self.room, default=None)
        if best is None:
            return None
        fits = self.room(best) >= samples
        if not fits:  # larger than any replica: one that is empty takes it
            widest = max(self.replicas[name].room for name in able)
            empty = [name for name in able if not self.replicas[name].groups]
            return max(empty, key=self.room) if empty and samples > widest else None
        return best

    def _late(self, now: float) -> list[int]:
        """Groups that have taken far longer than others, the latest first, and may have one copy more."""
        if len(self._seconds) < LEAST_FINISHED:
            return []
        limit = self.late_factor * statistics.median(self._seconds)
        since = {g: at for r in self.replicas.values() for g, at in reversed(r.groups.items())}
        late = [g for g, at in since.items() if now - at > limit and len(self.groups[g].makers) < MOST_COPIES]
        return sorted(late, key=lambda g: since[g])

    def _give(self, group: int, replica: str, now: float) -> Issue:
        self.groups[group].makers.append(replica)
        self.replicas[replica].groups[group] = now
        return Issue(replica, group)

    def _bury(self, replica: str) -> None:
        if self.replicas[replica].is_leaving and not self.replicas[replica].groups:
            del self.replicas[replica]
