"""Devices by data sheet, and clusters of them: what a plan needs to know of machines that are not here.

Peaks are dense 16-bit products (8-bit ones where the device has them) and memory traffic. Prices and watts are round
figures for an estimate of cost; a cluster's file says its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tidemill.device.ascend import names as npu_names
from tidemill.errors import ConfigError, did_you_mean
from tidemill.topology import describe, discover
from tidemill.topology.tree import KINDS, Level, Topology

T, G = 1e12, 1e9


@dataclass(frozen=True, slots=True)
class DeviceSheet:
    name: str
    kind: str  # cuda, npu or cpu
    flops: float  # per second, 16-bit (of a CPU: 32-bit, one core)
    bytes_per_s: float
    memory_bytes: float
    flops8: float = 0.0  # 8-bit products; 0: not faster
    host_bytes_per_s: float = 25 * G  # to the host's memory and back
    watts: float = 700.0  # under load
    idle_watts: float = 100.0
    price_per_hour: float = 0.0  # dollars


SHEETS: dict[str, DeviceSheet] = {
    sheet.name: sheet
    for sheet in (
        DeviceSheet("B200", "cuda", 2250 * T, 8.0 * T, 180 * G, 4500 * T, 50 * G, 1000, 140, 6.0),
        DeviceSheet("H200", "cuda", 989 * T, 4.8 * T, 141 * G, 1979 * T, 50 * G, 700, 110, 3.5),
        DeviceSheet("H100", "cuda", 989 * T, 3.35 * T, 80 * G, 1979 * T, 50 * G, 700, 110, 2.5),
        DeviceSheet("H800", "cuda", 989 * T, 3.35 * T, 80 * G, 1979 * T, 50 * G, 700, 110, 2.5),
        DeviceSheet("H20", "cuda", 148 * T, 4.0 * T, 96 * G, 296 * T, 50 * G, 400, 90, 1.5),
        DeviceSheet("A100", "cuda", 312 * T, 2.039 * T, 80 * G, 0, 25 * G, 400, 80, 1.5),
        DeviceSheet("L40S", "cuda", 362 * T, 0.864 * T, 48 * G, 733 * T, 25 * G, 350, 60, 1.0),
        DeviceSheet("910B", "npu", 376 * T, 1.6 * T, 64 * G, 0, 25 * G, 400, 90, 1.5),  # Atlas A2
        DeviceSheet(
            "910C", "npu", 376 * T, 1.6 * T, 64 * G, 0, 25 * G, 400, 90, 1.5
        ),  # one die; Atlas A3 has two a card
        DeviceSheet("cpu", "cpu", 0.1 * T, 10 * G, 8 * G, 0, 10 * G, 15, 5, 0.05),  # one core
    )
}


@dataclass(frozen=True, slots=True)
class Machines:
    """A cluster to plan for: a topology whose devices are of one kind."""

    topology: Topology
    sheet: DeviceSheet
    cores: int = 0  # of a CPU's machine, which its workers share; 0: devices are their own

    @property
    def devices(self) -> int:
        return self.topology.devices

    @property
    def per_node(self) -> int:
        return self.topology.size("node")


MACHINE_KEYS = {"name", "device", "levels", "price_per_hour", "watts", "idle_watts", "memory_gb", "tflops", "gb_per_s"}
KEYS_OF_SHEET = {
    "price_per_hour": ("price_per_hour", 1.0),
    "watts": ("watts", 1.0),
    "idle_watts": ("idle_watts", 1.0),
    "memory_gb": ("memory_bytes", G),
    "tflops": ("flops", T),
    "gb_per_s": ("bytes_per_s", G),
}


def load(path: str | Path) -> Machines:
    """A cluster's file: a topology, and what its devices cost or differ in from their data sheet."""
    try:
        plain = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        said = getattr(error, "strerror", None) or str(error).replace("\n", " ")
        remedy = "give a cluster's file (docs/launch.md), or such as 8xH100"
        raise ConfigError(f"--cluster {path}: {said}", remedy) from error
    return parse(plain, str(path))


def parse(plain: Any, where: str = "cluster") -> Machines:
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{where}: a mapping is expected, not {plain!r}", f"of {', '.join(sorted(MACHINE_KEYS))}")
    for key in plain:
        if key not in MACHINE_KEYS:
            raise ConfigError(
                f"{where}: there is no field {key!r}{did_you_mean(str(key), MACHINE_KEYS)}",
                f"use {', '.join(sorted(MACHINE_KEYS))}",
            )
    own = {key: value for key, value in plain.items() if key in KEYS_OF_SHEET}
    for key, value in own.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigError(f"{where}.{key}={value!r}: a number from 0 is expected")
    topology = describe.parse({key: value for key, value in plain.items() if key not in KEYS_OF_SHEET}, where)
    sheet = sheet_of(topology.device, own, where)
    changed = {KEYS_OF_SHEET[key][0]: value * KEYS_OF_SHEET[key][1] for key, value in own.items()}
    return Machines(topology, replace(sheet, **changed), 1 if sheet.kind == "cpu" else 0)


def sheet_of(device: str, own: Mapping[str, Any], where: str) -> DeviceSheet:
    name = find(device)
    if name is not None:
        return SHEETS[name]
    missing = [key for key in ("tflops", "gb_per_s", "memory_gb") if key not in own]
    if missing:
        raise ConfigError(
            f"{where}: the device {device!r} is not on file{did_you_mean(device, SHEETS)}; say {', '.join(missing)}",
            f"on file are {', '.join(SHEETS)}",
        )
    return DeviceSheet(device, "cuda", 1, 1, 1)


def find(device: str) -> str | None:
    """A device's name on file, however a driver calls it: `NVIDIA H200` is H200."""
    if (family := npu_names.family(device)) is not None:
        return family
    words = device.lower().replace("-", " ").split()
    return next((name for name in SHEETS if name.lower() in words or name.lower() == device.lower()), None)


def cluster_of(device: str, nodes: int, per_node: int = 8, between: str = "ib400") -> Machines:
    """Equal nodes of a known device, joined as such nodes usually are."""
    sheet = SHEETS[device]
    inside = {"npu": "hccs", "cpu": "memory"}.get(sheet.kind, "nvlink4")
    levels = [Level("node", per_node, KINDS[inside])]
    if nodes > 1:
        levels.append(Level("pod", nodes, KINDS[between]))
    return Machines(Topology(f"{nodes} × {per_node} {device}", device, tuple(levels)), sheet)


def this_machine(processes: int = 1) -> Machines:
    """The devices of this machine; of a machine without accelerators its cores, which `processes` workers share."""
    from tidemill import device
    from tidemill.device import host

    kind, count = device.count()
    if not count:
        topology = Topology("this machine", "cpu", (Level("node", max(1, processes), KINDS["memory"]),))
        return Machines(topology, replace(SHEETS["cpu"], memory_bytes=host.memory().free), host.cores())
    chosen = device.pick(kind)
    name = find(chosen.name)
    peak = chosen.peak()
    sheet = SHEETS[name] if name else DeviceSheet(chosen.name, kind, 100 * T, T, 16 * G)
    if peak is not None:
        sheet = replace(sheet, flops=peak.flops, bytes_per_s=peak.bytes_per_s)
    sheet = replace(sheet, memory_bytes=float(chosen.memory().total))
    link = KINDS["hccs" if kind == "npu" else "nvlink4"]
    return Machines(discover.this_machine(count, sheet.name, link), sheet)
