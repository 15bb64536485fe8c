"""A cluster's topology: devices in sockets, nodes, super-nodes, racks and pods, and the links that join them.

A topology is a regular tree. Each level says how many groups of the level below it holds and which link joins them; a
device's rank is its place in the tree, counted from the innermost level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tidemill.errors import ConfigError, did_you_mean

LEVELS = ("socket", "node", "supernode", "rack", "pod")  # from the inside outwards; any may be left out but node
GIGA, MICRO = 1e9, 1e-6


@dataclass(frozen=True, slots=True)
class Link:
    """`gb_per_s` is what one device sends while all devices of the group send: 10⁹ bytes a second, one direction."""

    kind: str
    gb_per_s: float
    us: float = 0.0  # latency of one message

    def seconds(self, size: float) -> float:
        return self.us * MICRO + size / (self.gb_per_s * GIGA)


# One device's share, one direction, by data sheets: a start for a description, not a measurement.
KINDS: dict[str, Link] = {
    "nvlink4": Link("nvlink4", 450, 1),
    "nvlink5": Link("nvlink5", 900, 1),
    "hccs": Link("hccs", 196, 1),
    "pcie4": Link("pcie4", 32, 2),
    "pcie5": Link("pcie5", 64, 2),
    "roce200": Link("roce200", 25, 5),
    "roce400": Link("roce400", 50, 5),
    "ib400": Link("ib400", 50, 3),
    "tcp": Link("tcp", 1.25, 30),
    "memory": Link("memory", 6, 1),  # between processes of one host
}


@dataclass(frozen=True, slots=True)
class Level:
    name: str
    holds: int  # groups of the level below, or devices
    link: Link


@dataclass(frozen=True, slots=True)
class Topology:
    name: str
    device: str  # what each device is called, such as H200 or 910C
    levels: tuple[Level, ...]  # from the inside outwards

    @property
    def devices(self) -> int:
        return prod(level.holds for level in self.levels)

    def size(self, name: str) -> int:
        """The devices in one group of a level; a level that is not described has one group of the level below."""
        if name not in LEVELS:
            raise ConfigError(f"there is no level {name!r}{did_you_mean(name, LEVELS)}", f"levels: {', '.join(LEVELS)}")
        return prod(level.holds for level in self.levels if LEVELS.index(level.name) <= LEVELS.index(name))

    def groups(self, name: str) -> list[range]:
        """The ranks of each group of a level, in order."""
        size = self.size(name)
        return [range(start, start + size) for start in range(0, self.devices, size)]

    def shared(self, one: int, other: int) -> Level | None:
        """The innermost level whose group holds both ranks; none if they are the same device."""
        self._check(one, other)
        if one == other:
            return None
        size = 1
        for level in self.levels:
            size *= level.holds
            if one // size == other // size:
                return level
        raise AssertionError("the outermost level holds every rank")

    def seconds(self, size: float, one: int, other: int) -> float:
        """How long a message takes between two devices; nothing on one device."""
        level = self.shared(one, other)
        return 0.0 if level is None else level.link.seconds(size)

    def crossings(self, ranks: Sequence[int]) -> dict[str, int]:
        """How often a ring over the ranks, in the given order, crosses each level."""
        found = dict.fromkeys((level.name for level in self.levels), 0)
        for one, other in zip(ranks, [*ranks[1:], *ranks[:1]]):
            if (level := self.shared(one, other)) is not None:
                found[level.name] += 1
        return found

    def _check(self, *ranks: int) -> None:
        for rank in ranks:
            if not 0 <= rank < self.devices:
                raise ConfigError(f"rank {rank} is not in {self.name}, which has {self.devices} devices")
