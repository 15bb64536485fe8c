"""Devices by name. Only this folder knows what an accelerator is called.

Importing it is cheap: torch, and a vendor's package, load when a device is picked.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util

from tidemill.device.api import VISIBLE, Device, DeviceMemory
from tidemill.errors import ConfigError, did_you_mean

KINDS = ("cpu", "cuda", "npu")
RESOURCES = {"cuda": "GPU", "npu": "NPU"}  # what a cluster calls one device of a kind
TRITON = ("cuda",)  # kinds that Triton compiles our kernels for
VENDORS = {"npu": "torch_npu"}  # packages that bring a kind of device to torch
# Of a process that others are forked from: looking for devices must not open a driver, which survives no fork. Vendors'
# packages load in the children (`after_fork`).
BEFORE_FORK = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}

__all__ = [
    "BEFORE_FORK", "KINDS", "RESOURCES", "VISIBLE", "Device", "DeviceMemory", "after_fork", "available", "count",
    "has_triton", "pick",
]  # fmt: skip


def pick(name: str = "auto") -> Device:
    """`auto` is the first accelerator that works here, else the CPU; `cuda:1` is one of several."""
    kind, _, digits = name.partition(":")
    if kind == "auto":
        kind = _best_kind()
    if kind not in KINDS or (digits and not digits.isdigit()):
        known = ("auto", *KINDS)
        raise ConfigError(f"device={name} is unknown{did_you_mean(kind, known)}", f"use one of {', '.join(known)}")
    return _open(kind, int(digits or 0))


def available() -> list[Device]:
    """Every device usable now, accelerators first. A vendor's package that torch did not load is not tried."""
    import torch

    found: list[Device] = []
    kind = _best_kind()
    if kind != "cpu":
        found += [_open(kind, i) for i in range(torch.accelerator.device_count())]
    return [*found, _open("cpu", 0)]


def count() -> tuple[str, int]:
    """The kind of accelerator that works here, and how many of them this process may see; none: the CPU, and 0."""
    import torch

    kind = _best_kind()
    return kind, torch.accelerator.device_count() if kind != "cpu" else 0


@functools.cache
def has_triton(kind: str) -> bool:
    """Whether our Triton kernels can run on devices of a kind."""
    return kind in TRITON and importlib.util.find_spec("triton") is not None


def after_fork() -> None:
    """Load a vendor's package that the process this one was forked from had to leave alone."""
    import torch

    for kind, package in VENDORS.items():
        if not hasattr(torch, kind) and importlib.util.find_spec(package) is not None:
            with contextlib.suppress(ImportError, OSError, RuntimeError):  # without its driver it cannot load
                importlib.import_module(package)


def _best_kind() -> str:
    import torch

    if not torch.accelerator.is_available():
        return "cpu"
    current = torch.accelerator.current_accelerator()
    return current.type if current is not None and current.type in KINDS else "cpu"


def _open(kind: str, index: int) -> Device:
    if kind == "cuda":
        from tidemill.device import cuda

        return cuda.open(index)
    if kind == "npu":
        from tidemill.device.ascend import npu

        return npu.open(index)
    from tidemill.device import cpu

    return cpu.open(index)
