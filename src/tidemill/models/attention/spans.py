"""Attention in which every span of a row sees the whole of itself, as patches of an image do.

Where torch has its variable-length flash kernel that serves all spans at once; elsewhere spans of one length are one
dense block each, which needs no padding because towers cut images into equal windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.models.attention import varlen
from tidemill.models.upload import upload


class Spans:
    """Of these lengths, one after another."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths, self.device = list(lengths), device

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """(tokens, heads, dim) each, and so the result."""
        if varlen.works_on(q.device, q.dtype) and q.shape[-1] <= varlen.MOST_DIM:
            ends, longest = self._ends
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            out: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(
                q, k, v, ends, ends, longest, longest, 0.0, False, False, scale=scale
            )
            return out[0]
        if len(set(self.lengths)) == 1:
            return _dense(q, k, v, len(self.lengths), scale)
        parts = [_dense(q[at], k[at], v[at], count, scale) for at, count in self._by_length]
        return torch.cat(parts).index_select(0, self._restore)

    @cached_property
    def _ends(self) -> tuple[Tensor, int]:
        return upload(np.cumsum([0, *self.lengths]), self.device, np.int32), max(self.lengths)

    @cached_property
    def _by_length(self) -> list[tuple[Tensor, int]]:
        """The tokens of all spans of each length, and how many spans those are."""
        starts, lengths = np.cumsum([0, *self.lengths])[:-1], np.array(self.lengths)
        found = []
        for length in dict.fromkeys(self.lengths):
            own = starts[lengths == length]
            found.append((upload((own[:, None] + np.arange(length)).reshape(-1), self.device), len(own)))
        return found

    @cached_property
    def _restore(self) -> Tensor:
        return torch.argsort(torch.cat([at for at, _ in self._by_length]))


def _dense(q: Tensor, k: Tensor, v: Tensor, count: int, scale: float) -> Tensor:
    tokens, heads, dim = q.shape
    q, k, v = (x.reshape(count, tokens // count, heads, dim).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, scale=scale)
    return out.transpose(1, 2).reshape(tokens, heads, dim)
