"""Sensors of a machine: NVIDIA devices by NVML, Ascend devices by DCMI (what `npu-smi` reads), processors by RAPL. What
cannot be read is None: unknown is not guessed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tidemill.device import VISIBLE

RAPL = Path("/sys/class/powercap")
DCMI = ("libdcmi.so", "/usr/local/dcmi/libdcmi.so", "/usr/local/Ascend/driver/lib64/driver/libdcmi.so")
MILLI, MICRO, DECI, MEGA = 1e-3, 1e-6, 0.1, float(1 << 20)
MOST_CARDS = 64
AI_CORE = 2  # whose utilisation DCMI is asked for


@dataclass(frozen=True, slots=True)
class Look:
    """One device at one moment; None: unknown."""

    power_w: float | None = None
    utilisation: float | None = None  # share of time in which a kernel ran
    memory_bytes: float | None = None
    temperature_c: float | None = None


class Devices(Protocol):
    """Devices whose sensors can be read."""

    names: list[str]  # of each device, the same for every process of its machine

    def looks(self) -> list[Look]: ...

    def energies_j(self) -> list[float | None]:
        """Counted by each device itself since some moment; None where it does not count."""

    def close(self) -> None: ...


class Nvml:
    """NVIDIA devices by their driver's library. `chosen`: which of those that this process may see."""

    def __init__(self, chosen: Iterable[int] | None = None) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        names = visible("cuda") or [str(i) for i in range(pynvml.nvmlDeviceGetCount())]
        own = names if chosen is None else [names[i] for i in chosen if i < len(names)]
        self._handles = [self._handle(name) for name in own]
        self.names = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in self._handles]
        self._has_instant = True  # older drivers know only the mean of the last second

    def _handle(self, name: str) -> Any:
        by_index = self._nvml.nvmlDeviceGetHandleByIndex
        return by_index(int(name)) if name.isdigit() else self._nvml.nvmlDeviceGetHandleByUUID(name)

    def looks(self) -> list[Look]:
        return [self._look(handle) for handle in self._handles]

    def _look(self, handle: Any) -> Look:
        nvml, asked = self._nvml, self._asked
        return Look(
            power_w=self._power(handle),
            utilisation=asked(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            memory_bytes=asked(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            temperature_c=asked(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        )

    def energies_j(self) -> list[float | None]:
        ask = self._nvml.nvmlDeviceGetTotalEnergyConsumption
        return [self._asked(partial(ask, handle), MILLI) for handle in self._handles]

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def _power(self, handle: Any) -> float | None:
        """Drawn at this moment. The plain call tells the mean of the last second on most devices, which lags behind a
        load that has just begun by half of that."""
        if self._has_instant:
            found = self._asked(lambda: self._instant(handle))
            if found is not None:
                return found
            self._has_instant = False
        return self._asked(lambda: self._nvml.nvmlDeviceGetPowerUsage(handle), MILLI)

    def _instant(self, handle: Any) -> float:
        field = self._nvml.nvmlDeviceGetFieldValues(handle, [self._nvml.NVML_FI_DEV_POWER_INSTANT])[0]
        if field.nvmlReturn != self._nvml.NVML_SUCCESS:
            raise self._nvml.NVMLError(field.nvmlReturn)
        return int(field.value.uiVal) * MILLI

    def _asked(self, ask: Callable[[], float], unit: float = 1.0) -> float | None:
        try:
            return float(ask()) * unit
        except (self._nvml.NVMLError, AttributeError):  # an older pynvml lacks a name
            return None


class _Hbm(ctypes.Structure):
    _fields_ = [
        ("memory_size", ctypes.c_ulonglong),  # MB
        ("freq", ctypes.c_uint),
        ("memory_usage", ctypes.c_ulonglong),  # MB
        ("temp", ctypes.c_int),
        ("bandwidth_rate", ctypes.c_uint),
    ]


class Dcmi:
    """Ascend devices by their driver's library. They do not count energy themselves."""

    def __init__(self, chosen: Iterable[int] | None = None, library: str = "") -> None:
        self._dcmi = _loaded([library] if library else DCMI)
        if status := self._dcmi.dcmi_init():
            raise OSError(f"dcmi_init gave {status}")
        every = self._every()
        names = [int(name) for name in visible("npu") if name.isdigit()] or list(range(len(every)))
        own = names if chosen is None else [names[i] for i in chosen if i < len(names)]
        self._devices = [every[i] for i in own if i < len(every)]
        self.names = [f"{card}-{device}" for card, device in self._devices]

    def _every(self) -> list[tuple[int, int]]:
        """All devices as (card, device of the card), in the order in which torch_npu counts them."""
        count, cards = ctypes.c_int(), (ctypes.c_int * MOST_CARDS)()
        if self._dcmi.dcmi_get_card_list(ctypes.byref(count), cards, MOST_CARDS):
            return []
        found = []
        for card in cards[: count.value]:
            devices = ctypes.c_int()
            if not self._dcmi.dcmi_get_device_num_in_card(card, ctypes.byref(devices)):
                found += [(card, i) for i in range(devices.value)]
        return found

    def looks(self) -> list[Look]:
        return [self._look(*place) for place in self._devices]

    def _look(self, card: int, device: int) -> Look:
        rate = self._asked("dcmi_get_device_utilization_rate", ctypes.c_uint(), card, device, AI_CORE)
        power = self._asked("dcmi_get_device_power_info", ctypes.c_int(), card, device)
        degrees = self._asked("dcmi_get_device_temperature", ctypes.c_int(), card, device)
        hbm = self._asked("dcmi_get_device_hbm_info", _Hbm(), card, device)
        return Look(
            power_w=None if power is None else power.value * DECI,
            utilisation=None if rate is None else rate.value / 100,
            memory_bytes=None if hbm is None else hbm.memory_usage * MEGA,
            temperature_c=None if degrees is None else float(degrees.value),
        )

    def _asked(self, call: str, into: Any, *arguments: int) -> Any:
        """None where this device or driver does not tell."""
        try:
            return None if getattr(self._dcmi, call)(*arguments, ctypes.byref(into)) else into
        except AttributeError:
            return None

    def energies_j(self) -> list[float | None]:
        return [None] * len(self._devices)

    def close(self) -> None:
        """Nothing is held."""


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


def open_devices(kind: str, chosen: Iterable[int] | None = None) -> Devices | None:
    """None where there are none, or the package or the driver is missing."""
    sensors: dict[str, Callable[[Iterable[int] | None], Devices]] = {"cuda": Nvml, "npu": Dcmi}
    try:
        return sensors[kind](chosen) if kind in sensors else None
    except Exception:  # ImportError, or whatever a driver that is half installed does
        return None


def visible(kind: str) -> list[str]:
    """The devices that this process may use, as the environment lists them; empty: all of the machine."""
    return [name.strip() for name in os.environ.get(VISIBLE[kind], "").split(",") if name.strip()]


def _loaded(names: Sequence[str]) -> Any:
    for name in names:
        with suppress(OSError):
            return ctypes.CDLL(name)
    raise OSError(f"none of {', '.join(names)} can be loaded")


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
