"""The CPU as a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidemill.device import host
from tidemill.device.api import DeviceMemory, Peak
from tidemill.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Cpu:
    kind: str = "cpu"
    index: int = 0

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def name(self) -> str:
        return f"{host.processor()}, {host.cores()} cores"

    def memory(self) -> DeviceMemory:
        return host.memory()

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def supports(self, dtype: str) -> bool:
        if dtype == "bfloat16":
            # Without these instructions bfloat16 works, but at a fraction of float32's speed.
            return host.has_bfloat16()
        return dtype == "float32"

    def peak(self) -> Peak | None:
        return None

    def power_w(self) -> float | None:
        return None


def open(index: int) -> Cpu:
    if index:
        raise ConfigError(f"device=cpu:{index}: there is one CPU device", "use device=cpu")
    return Cpu()
