"""PackedBuffer: reusable memory into which batches are gathered, page-locked where a device will read it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class PackedBuffer:
    """One region per column, grown when needed and never shrunk. A batch gathered into it is valid until the next."""

    def __init__(self, pinned: bool | None = None) -> None:
        self.pinned = _has_device() if pinned is None else pinned
        self._regions: dict[str, npt.NDArray[np.uint8]] = {}

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        region = self._regions.get(name)
        if region is None or len(region) < nbytes:
            region = self._regions[name] = self._new(nbytes + nbytes // 4)
        return region[:nbytes].view(dtype).reshape(shape)

    @property
    def nbytes(self) -> int:
        return sum(len(region) for region in self._regions.values())

    def _new(self, nbytes: int) -> npt.NDArray[np.uint8]:
        if not self.pinned:
            return np.empty(nbytes, np.uint8)
        import torch

        region: npt.NDArray[np.uint8] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        return region


def _has_device() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.accelerator.is_available())
