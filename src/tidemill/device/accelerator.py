"""What accelerators have in common: torch gives each vendor's module the same functions."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

import torch

from tidemill.device.api import DeviceMemory, Peak

POWER_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Accelerator:
    kind: str
    index: int
    backend: Any  # torch.cuda, torch.npu
    peaks: tuple[tuple[str, Peak], ...]  # first whose words occur in the name
    power_command: tuple[str, ...]
    power_pattern: str  # its first group is watts

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
            return self._power_by_command()

    def _power_by_command(self) -> float | None:
        if shutil.which(self.power_command[0]) is None:
            return None
        command = [part.format(index=self.index) for part in self.power_command]
        try:
            out = subprocess.run(command, capture_output=True, text=True, timeout=POWER_TIMEOUT_S, check=True).stdout
        except (subprocess.SubprocessError, OSError):
            return None
        found = re.search(self.power_pattern, out)
        return float(found[1]) if found else None
