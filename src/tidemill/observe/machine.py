"""What a step took of its machines: memory, utilisation, power, energy, temperature and network.

Where a process has devices, a thread looks at them a few times a second. What cannot be read (no NVML, no right to read
RAPL) is left out: unknown is not guessed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.device.peaks import PEAKS
from tidemill.observe.sensors import Devices, Look, Rapl, open_devices

LOOK_S = 0.25  # between looks; one takes 1 ms with NVML, outside Python's lock
NETWORK = Path("/proc/net/dev")
ENERGY, HOST_ENERGY, TRAFFIC, PEAK = "energy_j", "energy_host_j", "network_bytes", "host_memory_peak"


@dataclass(frozen=True, slots=True)
class Readings:
    """Of one process: its devices by their names, and its machine."""

    devices: dict[str, dict[str, float]] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)


class Sampler:
    """`readings` gives what the time since `begin` took; a thread looks in between."""

    def __init__(self, devices: Devices | None, rapl: Rapl | None = None, look_s: float = LOOK_S) -> None:
        self._devices, self._rapl, self._look_s = devices, rapl, look_s
        self._mutex = threading.Lock()
        self._looks: list[list[Look]] = []
        self.begin()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        if devices is not None:
            self._thread = threading.Thread(target=self._run, name="machine", daemon=True)
            self._thread.start()

    def begin(self) -> None:
        """Forget what was before: a step's readings are of that step alone, not of an evaluation before it."""
        with self._mutex:
            self._looks = []
        self._began = time.perf_counter()
        self._joules = self._energies()
        self._host_j = self._rapl.energy_j() if self._rapl is not None else None
        self._network = network_bytes()

    def readings(self) -> Readings:
        self._look()
        with self._mutex:
            looks, self._looks = self._looks, []
        host = {
            HOST_ENERGY: _risen(self._host_j, self._rapl.energy_j() if self._rapl is not None else None),
            TRAFFIC: _risen(self._network, network_bytes()),
            PEAK: float(PEAKS.whole().host),
        }
        return Readings(self._of_devices(looks), {name: value for name, value in host.items() if value is not None})

    def close(self) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join(5.0)
        if self._devices is not None:
            with suppress(Exception):  # a driver that fails at the end changes nothing
                self._devices.close()

    def _run(self) -> None:
        while not self._ending.wait(self._look_s):
            self._look()

    def _look(self) -> None:
        if self._devices is not None:
            seen = self._devices.looks()
            with self._mutex:
                self._looks.append(seen)

    def _energies(self) -> list[float | None]:
        return self._devices.energies_j() if self._devices is not None else []

    def _of_devices(self, looks: list[list[Look]]) -> dict[str, dict[str, float]]:
        """Means over the step, the most of memory and temperature; energy by the devices' own counters, where they have
        none by the mean of their power."""
        seconds, now = time.perf_counter() - self._began, self._energies()
        found: dict[str, dict[str, float]] = {}
        for i, name in enumerate(self._devices.names if self._devices is not None else ()):
            rows = [row[i] for row in looks]
            power, counted = _mean(_known(rows, "power_w")), _risen(self._joules[i], now[i])
            values = {
                "power_w": power,
                "utilisation": _mean(_known(rows, "utilisation")),
                "device_memory_used": _most(_known(rows, "memory_bytes")),
                "temperature_c": _most(_known(rows, "temperature_c")),
                ENERGY: counted if counted is not None else None if power is None else power * seconds,
            }
            found[name] = {key: value for key, value in values.items() if value is not None}
        return found


def combined(own: Readings, home: str, workers: Mapping[str, tuple[str, Readings]]) -> dict[str, float]:
    """Metrics of all machines. `own`: of the driver's process, on the node `home`; `workers`: node and readings of
    each. Devices are called by the worker that has them, or by their number in the driver's process; one that several
    workers share counts once. A sum that lacks a device or a node is left out."""
    devices: dict[tuple[str, str], tuple[str, dict[str, float]]] = {}
    for i, (name, values) in enumerate(own.devices.items()):
        devices[home, name] = (str(i), values)
    hosts = {home: dict(own.host)}
    for worker, (node, told) in workers.items():
        for name, values in told.devices.items():
            devices.setdefault((node, name), (worker if len(told.devices) == 1 else f"{worker}.{name}", values))
        hosts.setdefault(node, dict(told.host))
    found = {
        f"machine/{what}/{called}": value
        for called, values in devices.values()
        for what, value in values.items()
        if what != ENERGY
    }
    joules = [values.get(ENERGY) for _, values in devices.values()]
    sums = {
        "machine/energy_device_j": _sum(joules),
        "machine/energy_host_j": _sum([host.get(HOST_ENERGY) for host in hosts.values()]),
        "machine/network_bytes": _sum([host.get(TRAFFIC) for host in hosts.values()]),
        "machine/host_memory_peak": own.host.get(PEAK),
    }
    return found | {name: value for name, value in sums.items() if value is not None}


def network_bytes() -> float | None:
    """Received and sent by all of the machine's interfaces but loopback, since it started."""
    try:
        lines = NETWORK.read_text().splitlines()[2:]
    except OSError:
        return None
    rows = (line.partition(":") for line in lines)
    counts = [rest.split() for name, _, rest in rows if name.strip() != "lo"]
    return sum(float(row[0]) + float(row[8]) for row in counts if len(row) > 8)


def _known(rows: Iterable[Look], field: str) -> list[float]:
    return [value for row in rows if (value := getattr(row, field)) is not None]


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None


def _most(values: Iterable[float]) -> float | None:
    return max(values, default=None)


def _sum(values: Iterable[float | None]) -> float | None:
    listed = list(values)
    known = [value for value in listed if value is not None]
    return sum(known) if known and len(known) == len(listed) else None


def _risen(before: float | None, now: float | None) -> float | None:
    return None if before is None or now is None else now - before


def sampler(kind: str, chosen: Iterable[int] | None = None) -> Sampler:
    """For work on devices of `kind`: cuda, npu or cpu. `chosen`: which of those that this process may see."""
    return Sampler(open_devices(kind, chosen), Rapl())
