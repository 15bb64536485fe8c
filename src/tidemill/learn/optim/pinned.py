"""Host memory for optimizer state that a device copies to and from at full speed."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST, MOST = 1 << 26, 1 << 32  # bytes of one piece
ALIGNMENT = 64


class Pinned:
    """Tensors cut from few large pieces. torch rounds each pinned allocation up to a power of two: for one tensor at a
    time that wastes up to half of the host's memory. A new piece is as large as all before it, so little state stays
    little and much of it lies in large pieces."""

    def __init__(self, least: int = LEAST, most: int = MOST, pin: bool = True) -> None:
        self.least, self.most, self.pin = least, most, pin
        self._pieces: list[tuple[Tensor, int]] = []  # a piece, and how much of it is given out

    def like(self, x: Tensor) -> Tensor:
        """An empty tensor of x's shape and dtype; it keeps its piece alive."""
        size = -(-x.nbytes // ALIGNMENT) * ALIGNMENT
        at = next((i for i, (piece, used) in enumerate(self._pieces) if used + size <= piece.numel()), None)
        if at is None:
            so_far = 1 << (self.allocated.bit_length() - 1) if self._pieces else 0
            rounded = max(min(max(self.least, so_far), self.most), 1 << (size - 1).bit_length())
            at = len(self._pieces)
            self._pieces.append((torch.empty(rounded, dtype=torch.uint8, pin_memory=self.pin), 0))
        piece, used = self._pieces[at]
        self._pieces[at] = (piece, used + size)
        return piece[used : used + x.nbytes].view(x.dtype).view(x.shape)

    @property
    def allocated(self) -> int:
        return sum(piece.numel() for piece, _ in self._pieces)
