"""What every device can be asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}  # which of them a process may see


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes. `reserved` is what this process holds, in use or not."""

    free: int
    total: int
    reserved: int


@dataclass(frozen=True, slots=True)
class Peak:
    """What the vendor's data sheet promises: dense matrix products (no sparsity), and memory traffic."""

    flops: float  # per second, 16-bit
    bytes_per_s: float


class Device(Protocol):
    @property
    def kind(self) -> str:
        """cpu, cuda or npu."""

    @property
    def index(self) -> int: ...

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def name(self) -> str:
        """What it is, for people: 'NVIDIA H200'."""

    def memory(self) -> DeviceMemory: ...

    def synchronize(self) -> None:
        """Wait until everything asked of the device is done, so that a clock read now is honest."""

    def seed(self, seed: int) -> None: ...

    def supports(self, dtype: str) -> bool:
        """float32 or bfloat16, at the speed the device is made for."""

    def peak(self) -> Peak | None:
        """None when no data sheet is on file."""

    def power_w(self) -> float | None:
        """Drawn now, in watts; None when nothing here can tell."""
