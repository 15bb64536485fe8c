"""Memory that this process and one in another interpreter share: tensors of one model, by kind and name. It has no name
in any folder, so nothing of it is left behind, whoever dies."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

ALIGNED = 64  # bytes at whose multiples tensors begin, so that either side can take them as any type
Layout = list[tuple[str, list[int], int]]  # name, shape, and where it begins


class SharedTensors:
    """`kinds` of tensors, each with the names and shapes of `shapes`, in float32 where `dtypes` does not say."""

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        kinds: Sequence[str],
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        at, self.layout = 0, dict[str, Layout]()
        self._dtypes = dtypes or {}
        for kind in kinds:
            self.layout[kind] = []
            for name, shape in shapes.items():
                self.layout[kind].append((name, list(shape), at))
                at += -(-self._bytes(name, shape) // ALIGNED) * ALIGNED
        size = max(at, ALIGNED)
        self._file = os.memfd_create("tidemill-shared-tensors")
        os.ftruncate(self._file, size)
        self.file = f"/proc/{os.getpid()}/fd/{self._file}"  # what the other process opens
        self._whole = torch.from_file(self.file, shared=True, size=size, dtype=torch.uint8)
        self.views = {
            kind: {name: self._view(name, shape, at) for name, shape, at in own} for kind, own in self.layout.items()
        }

    def _dtype(self, name: str) -> torch.dtype:
        return self._dtypes.get(name, torch.float32)

    def _bytes(self, name: str, shape: Sequence[int]) -> int:
        return self._dtype(name).itemsize * prod(shape)

    def _view(self, name: str, shape: Sequence[int], at: int) -> Tensor:
        return self._whole[at : at + self._bytes(name, shape)].view(self._dtype(name)).view(*shape)

    def close_file(self) -> None:
        """Once both sides have mapped it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
