"""What a step took of its machine: memory, utilisation, power, energy, temperature, MFU and cost.

One thread looks a few times a second. What cannot be read (no NVML, no right to read RAPL, a device of unknown rate) is
left out: unknown is not guessed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tidemill.device import host

LOOK_S = 0.25  # between looks; one takes some 0.1 ms on a CPU and 1 ms with NVML, outside Python's lock
RAPL = Path("/sys/class/powercap")
MILLI, MICRO = 1e-3, 1e-6


@dataclass(frozen=True, slots=True)
class Look:
    """One device at one moment; None: unknown."""

    power_w: float | None = None
    utilisation: float | None = None  # share of time in which a kernel ran
    memory_bytes: float | None = None
    temperature_c: float | None = None


class Devices(Protocol):
    """Devices whose sensors can be read."""

    def looks(self) -> list[Look]: ...

    def energy_j(self) -> float | None:
        """Counted by the devices themselves since some moment; None where they do not count."""

    def close(self) -> None: ...


class Nvml:
    """NVIDIA devices by their driver's library; `indices` are its own, not torch's."""

    def __init__(self, indices: Iterable[int] | None = None) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        chosen = range(pynvml.nvmlDeviceGetCount()) if indices is None else indices
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in chosen]

    def looks(self) -> list[Look]:
        nvml = self._nvml
        return [
            Look(
                power_w=self._asked(lambda h=handle: nvml.nvmlDeviceGetPowerUsage(h) * MILLI),
                utilisation=self._asked(lambda h=handle: nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100),
                memory_bytes=self._asked(lambda h=handle: float(nvml.nvmlDeviceGetMemoryInfo(h).used)),
                temperature_c=self._asked(
                    lambda h=handle: float(nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU))
                ),
            )
            for handle in self._handles
        ]

    def energy_j(self) -> float | None:
        whole = 0.0
        for handle in self._handles:
            one = self._asked(lambda h=handle: self._nvml.nvmlDeviceGetTotalEnergyConsumption(h) * MILLI)
            if one is None:
                return None
            whole += one
        return whole if self._handles else None

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def _asked(self, ask: Any) -> float | None:
        try:
            return float(ask())
        except self._nvml.NVMLError:
            return None


def nvml(indices: Iterable[int] | None = None) -> Nvml | None:
    """None where the package or the driver is missing."""
    try:
        return Nvml(indices)
    except Exception:  # ImportError, or whatever a driver that is half installed does
        return None


class Rapl:
    """Energy of the processor's packages, where the kernel lets this user read it; counters run over."""

    def __init__(self, root: Path = RAPL) -> None:
        self._domains = [p for p in sorted(root.glob("*-rapl:*")) if _name(p).startswith("package")]
        self._last: dict[Path, int] = {}
        self._joules = 0.0
        self.is_readable = bool(self._domains) and all(_number(p / "energy_uj") is not None for p in self._domains)

    def energy_j(self) -> float | None:
        if not self.is_readable:
            return None
        for domain in self._domains:
            now = _number(domain / "energy_uj") or 0
            before = self._last.get(domain, now)
            whole = _number(domain / "max_energy_range_uj") or 0
            self._joules += (now - before if now >= before else now + whole - before) * MICRO
            self._last[domain] = now
        return self._joules


@dataclass(slots=True)
class Work:
    """What a step did, for the measures that are shares of it."""

    seconds: float
    tokens: float  # prompts and responses, each once
    rolled_tokens: float = 0.0  # those that went through rollout
    learned_tokens: float = 0.0
    parameters: int = 0
    devices: int = 1
    peak_flops: float | None = None  # of a device; None: unknown
    run_seconds: float = 0.0  # of all steps so far
    price_per_hour: float | None = None


class Sampler:
    """`measure` gives what the time since the last call took; a thread looks in between."""

    def __init__(self, devices: Devices | None, rapl: Rapl | None = None, look_s: float = LOOK_S) -> None:
        self._devices, self._rapl, self._look_s = devices, rapl, look_s
        self._mutex = threading.Lock()
        self._looks: list[list[Look]] = []
        self._host_peak = 0
        self._device_j = devices.energy_j() if devices is not None else None
        self._host_j = rapl.energy_j() if rapl is not None else None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="machine", daemon=True)
        self._thread.start()

    def measure(self, work: Work) -> dict[str, float]:
        self._look()
        with self._mutex:
            looks, self._looks = self._looks, []
            found = {"machine/host_memory_peak": float(self._host_peak)}
            self._host_peak = 0
        found |= _of_devices(looks) | self._energy(work, looks)
        found |= _mfu(work)
        if work.price_per_hour is not None:
            found["cost/so_far"] = work.price_per_hour * work.devices * work.run_seconds / 3600
        return found

    def close(self) -> None:
        self._ending.set()
        self._thread.join(5.0)
        if self._devices is not None:
            with suppress(Exception):  # a driver that fails at the end changes nothing
                self._devices.close()

    def _run(self) -> None:
        while not self._ending.wait(self._look_s):
            self._look()

    def _look(self) -> None:
        seen = self._devices.looks() if self._devices is not None else []
        resident = host.memory().reserved
        with self._mutex:
            self._looks.append(seen)
            self._host_peak = max(self._host_peak, resident)

    def _energy(self, work: Work, looks: list[list[Look]]) -> dict[str, float]:
        """By the devices' own counters; where they have none, by the mean of their power."""
        found: dict[str, float] = {}
        device = _risen(self._device_j, now := self._devices.energy_j() if self._devices is not None else None)
        self._device_j = now
        if device is None and (power := _mean(sum(p) for row in looks if (p := _known(row, "power_w")))) is not None:
            device = power * work.seconds
        cpu = _risen(self._host_j, now := self._rapl.energy_j() if self._rapl is not None else None)
        self._host_j = now
        if device is not None:
            found["machine/energy_device_j"] = device
        if cpu is not None:
            found["machine/energy_host_j"] = cpu
        joules = device if self._devices is not None else cpu
        if joules is not None and work.tokens:
            found["machine/joules_per_token"] = joules / work.tokens
        return found


def _of_devices(looks: list[list[Look]]) -> dict[str, float]:
    """Means over the step, and the most of memory and temperature, by device."""
    found: dict[str, float] = {}
    for i in range(max((len(row) for row in looks), default=0)):
        rows = [row[i] for row in looks if i < len(row)]
        for name, field, reduce in (
            ("power_w", "power_w", _mean),
            ("utilisation", "utilisation", _mean),
            ("device_memory_used", "memory_bytes", _most),
            ("temperature_c", "temperature_c", _most),
        ):
            if (value := reduce(_known(rows, field))) is not None:
                found[f"machine/{name}/{i}"] = value
    return found


def _mfu(work: Work) -> dict[str, float]:
    """2·N operations a token forward, 6·N forward and backward; attention is left out, so it is a lower bound."""
    if work.peak_flops is None or not work.seconds or not work.parameters:
        return {}
    flops = work.parameters * (2 * work.rolled_tokens + 6 * work.learned_tokens)
    return {"machine/mfu": flops / (work.seconds * work.devices * work.peak_flops)}


def _known(rows: Iterable[Look], field: str) -> list[float]:
    return [value for row in rows if (value := getattr(row, field)) is not None]


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None


def _most(values: Iterable[float]) -> float | None:
    return max(values, default=None)


def _risen(before: float | None, now: float | None) -> float | None:
    return None if before is None or now is None else now - before


def _name(domain: Path) -> str:
    try:
        return (domain / "name").read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def sampler(kind: str) -> Sampler:
    """For a run on devices of `kind`: cuda, npu or cpu."""
    return Sampler(nvml() if kind == "cuda" else None, Rapl())
