"""What devices of a kind can compute: which dtypes, which of torch's operators, and which of their vendor's own."""

from __future__ import annotations

import functools
from typing import Any

import torch

NO_FLOAT64 = ("npu",)  # kinds that compute in float32 at most


def widest(device: torch.device) -> torch.dtype:
    """The widest floating-point dtype that the device computes in."""
    return torch.float32 if device.type in NO_FLOAT64 else torch.float64


@functools.cache
def implements(kind: str, operator: str) -> bool:
    """Whether devices of a kind have a kernel for an operator, such as "aten::index_reduce.out". Without one torch
    would compute it on the host, with a copy each way."""
    try:
        key = torch._C._dispatch_key_for_device(kind)
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator, key))
    except RuntimeError:
        return False  # no such operator here


def operators(device: torch.device) -> Any:
    """The vendor's own operators for the device, by their names. Ask `implements` before calling one."""
    return getattr(torch.ops, device.type)
