"""A cluster's topology: devices in sockets, nodes, super-nodes, racks and pods, and the links that join them.

A topology is a regular tree. Each level says how many groups of the level below it holds and which link joins them; a
device's rank is its place in the tree, counted from the innermost level. It is described in YAML, discovered for this
machine, or made from the servers of Ascend's rank table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import yaml

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


# YAML


def load(path: str | Path) -> Topology:
    try:
        plain = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"topology {path}: {error}") from error
    return parse(plain, str(path))


def parse(plain: Any, where: str = "topology") -> Topology:
    """A description, checked: unknown keys, levels out of order and numbers that cannot be are refused."""
    fields = _fields(plain, {"name", "device", "levels"}, where)
    given = fields.get("levels")
    if not isinstance(given, list) or not given:
        raise ConfigError(f"{where}: levels is a list, from the inside outwards", f"of {', '.join(LEVELS)}")
    levels = tuple(_level(item, f"{where}: levels[{index}]") for index, item in enumerate(given))
    order = [LEVELS.index(level.name) for level in levels]
    if order != sorted(set(order)):
        raise ConfigError(f"{where}: levels must be in this order, each once: {', '.join(LEVELS)}")
    if "node" not in {level.name for level in levels}:
        raise ConfigError(f"{where}: the level node is missing", "what one machine holds must be known")
    return Topology(str(fields.get("name", "cluster")), str(fields.get("device", "device")), levels)


def _level(plain: Any, where: str) -> Level:
    fields = _fields(plain, {"level", "holds", "link"}, where)
    name = fields.get("level")
    if name not in LEVELS:
        raise ConfigError(f"{where}: no level {name!r}{did_you_mean(str(name), LEVELS)}", f"use {', '.join(LEVELS)}")
    return Level(name, int(_positive(fields, "holds", where, int)), _link(fields.get("link"), f"{where}.link"))


def _link(plain: Any, where: str) -> Link:
    """A known kind's name, or `{kind, gb_per_s, us}`; what is not said is the known kind's."""
    if isinstance(plain, str):
        plain = {"kind": plain}
    fields = _fields(plain, {"kind", "gb_per_s", "us"}, where)
    kind = str(fields.get("kind", ""))
    known = KINDS.get(kind)
    if known is None and "gb_per_s" not in fields:
        raise ConfigError(
            f"{where}: the rate of {kind!r} is not known{did_you_mean(kind, KINDS)}", "say gb_per_s (and us)"
        )
    rate = float(_positive(fields, "gb_per_s", where, float)) if "gb_per_s" in fields else known.gb_per_s  # type: ignore[union-attr]
    latency = fields.get("us", known.us if known else 0.0)
    if not isinstance(latency, int | float) or latency < 0:
        raise ConfigError(f"{where}.us={latency!r}: microseconds, 0 or more")
    return Link(kind, rate, float(latency))


def _fields(plain: Any, known: set[str], where: str) -> Mapping[str, Any]:
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{where}: fields are expected, not {plain!r}", f"of {', '.join(sorted(known))}")
    for key in plain:
        if key not in known:
            raise ConfigError(f"{where}: there is no field {key!r}{did_you_mean(str(key), known)}")
    return plain


def _positive(fields: Mapping[str, Any], key: str, where: str, kind: type) -> float:
    value = fields.get(key)
    allowed = int if kind is int else int | float
    if isinstance(value, bool) or not isinstance(value, allowed) or value <= 0:
        raise ConfigError(f"{where}.{key}={value!r}: a number above 0 is expected")
    return value


def dump(topology: Topology) -> str:
    levels = [
        {
            "level": level.name,
            "holds": level.holds,
            "link": {"kind": level.link.kind, "gb_per_s": level.link.gb_per_s, "us": level.link.us},
        }
        for level in topology.levels
    ]
    plain = {"name": topology.name, "device": topology.device, "levels": levels}
    return yaml.safe_dump(plain, sort_keys=False)


# Discovery


def from_servers(servers: Sequence[tuple[str, int]], device: str = "910") -> Topology:
    """Of a cluster whose servers are known as (super-node, devices), in the order of ranks: what a rank table says."""
    counts = {count for _, count in servers}
    sizes = {sum(pod == other for other, _ in servers) for pod, _ in servers}
    if len(counts) != 1 or len(sizes) != 1:
        raise ConfigError(
            "servers or super-nodes differ in size: no regular tree describes them", "launch on equal ones"
        )
    levels = [Level("node", counts.pop(), KINDS["hccs"])]
    per_pod, pods = sizes.pop(), len({pod for pod, _ in servers})
    if servers[0][0]:
        levels.append(Level("supernode", per_pod, KINDS["hccs"]))
        levels += [Level("pod", pods, KINDS["roce200"])] if pods > 1 else []
    elif len(servers) > 1:
        levels.append(Level("pod", len(servers), KINDS["roce200"]))
    return Topology("rank table", device, tuple(levels))


def this_machine(devices: int, device: str, link: Link, sys: Path = Path("/sys")) -> Topology:
    """One node: its devices over its NUMA sockets where they divide evenly, joined by `link`."""
    sockets = len(numa_cores(sys))
    if sockets > 1 and devices and devices % sockets == 0:
        levels = [Level("socket", devices // sockets, link), Level("node", sockets, link)]
    else:
        levels = [Level("node", max(1, devices), link)]
    return Topology("this machine", device, tuple(levels))


def numa_cores(sys: Path = Path("/sys")) -> dict[int, list[int]]:
    """The cores of each NUMA socket, for binding processes; one socket where the system names none."""
    found = {}
    for path in sorted((sys / "devices/system/node").glob("node[0-9]*")):
        cores = list(_cores((path / "cpulist").read_text(encoding="utf-8"))) if (path / "cpulist").exists() else []
        if cores:
            found[int(path.name.removeprefix("node"))] = cores
    return found


def numa_of(pci_address: str, sys: Path = Path("/sys")) -> int | None:
    """The NUMA socket that a device hangs on, by its PCI address; none where the system does not say."""
    file = sys / "bus/pci/devices" / re.sub(r"^0000(?=[0-9a-f]{4}:)", "", pci_address.lower()) / "numa_node"
    number = int(file.read_text(encoding="utf-8")) if file.exists() else -1
    return number if number >= 0 else None


def _cores(text: str) -> Iterator[int]:
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
