"""Topologies that are found: this machine's sockets and devices, or the servers of Ascend's rank table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tidemill.errors import ConfigError
from tidemill.topology.tree import KINDS, Level, Link, Topology


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
