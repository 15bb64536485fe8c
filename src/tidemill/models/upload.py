"""Small arrays from host to device without waiting for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(array: npt.ArrayLike, device: torch.device, dtype: Any = np.int64) -> Tensor:
    """A copy from pageable memory waits until the device has done all it was asked before; from pinned it does not."""
    host = torch.from_numpy(np.ascontiguousarray(array, dtype))
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
