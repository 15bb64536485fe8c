"""Memory that this process and MindSpore's share: weights, moments and gradients of one model. It has no name in any
folder, so nothing of it is left behind, whoever dies."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

WIDE = 4  # bytes of a float32, which everything here is
Layout = list[tuple[str, list[int], int]]  # name, shape, and where it begins


class SharedTensors:
    """`kinds` of tensors, each with the names and shapes of `shapes`."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], kinds: Sequence[str]) -> None:
        at, self.layout = 0, dict[str, Layout]()
        for kind in kinds:
            self.layout[kind] = []
            for name, shape in shapes.items():
                self.layout[kind].append((name, list(shape), at))
                at += WIDE * prod(shape)
        size = max(at, WIDE)
        self._file = os.memfd_create("tidemill-mindspore")
        os.ftruncate(self._file, size)
        self.file = f"/proc/{os.getpid()}/fd/{self._file}"  # what the other process opens
        self._whole = torch.from_file(self.file, shared=True, size=size, dtype=torch.uint8)
        self.views = {kind: {n: self._view(shape, at) for n, shape, at in own} for kind, own in self.layout.items()}

    def _view(self, shape: Sequence[int], at: int) -> Tensor:
        return self._whole[at : at + WIDE * prod(shape)].view(torch.float32).view(*shape)

    def close_file(self) -> None:
        """Once both sides have mapped it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
