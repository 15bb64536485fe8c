"""What accelerators have in common: torch gives each vendor's module the same functions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tidemill.device.api import VISIBLE, DeviceMemory, Peak

POWER_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Accelerator:
    kind: str
    index: int
    backend: Any  # torch.cuda, torch.npu
    peaks: tuple[tuple[str, Peak], ...]  # first whose words occur in the name
    power: Callable[[int], float | None]  # of a device as the machine counts it, where torch cannot tell

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.kind, self.index)

    @property
    def name(self) -> str:
        return str(self.backend.get_device_name(self.index))

    def memory(self) -> DeviceMemory:
        free, total = self.backend.mem_get_info(self.index)
        return DeviceMemory(free=free, total=total, reserved=self.backend.memory_reserved(self.index))

    def synchronize(self) -> None:
        self.backend.synchronize(self.index)

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.backend.manual_seed_all(seed)

    def supports(self, dtype: str) -> bool:
        return dtype == "float32" or (dtype == "bfloat16" and bool(self.backend.is_bf16_supported()))

    def peak(self) -> Peak | None:
        name = self.name.lower()
        return next((peak for words, peak in self.peaks if all(w in name for w in words.lower().split())), None)

    def power_w(self) -> float | None:
        try:
            return float(self.backend.power_draw(self.index)) / 1000  # asked of the driver: no process is started
        except (AttributeError, ImportError, RuntimeError):
            return self.power(physical(self.kind, self.index))


def physical(kind: str, index: int) -> int:
    """How the machine counts a device which this process, that may see only some, counts as `index`."""
    names = [name.strip() for name in os.environ.get(VISIBLE[kind], "").split(",") if name.strip()]
    return int(names[index]) if index < len(names) and names[index].isdigit() else index


def watts(command: tuple[str, ...], pattern: str) -> float | None:
    """What a vendor's tool prints, by a pattern whose first group is watts."""
    if shutil.which(command[0]) is None:
        return None
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=POWER_TIMEOUT_S, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return None
    found = re.search(pattern, out)
    return float(found[1]) if found else None
