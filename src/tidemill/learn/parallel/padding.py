"""Rows whose length is a multiple of the ranks that share them, and fillers for ranks that have nothing to do.

A tensor-parallel group deals a row's tokens out evenly, so up to (ranks - 1) tokens are added at its end. They see
nothing and nobody sees them; the layers around attention compute them for nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tidemill.learn.rows.packing import PackedBatch
from tidemill.models.attention.registry import AttentionForm, Context


class Padded:
    """A context for rows of which only the first `tokens` count."""

    def __init__(self, inner: Context | None, tokens: int) -> None:
        self.inner, self.tokens = inner, tokens

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
        n = self.tokens
        rest = q.new_zeros((q.shape[0] - n, q.shape[1], v.shape[-1]))
        if self.inner is None:
            # Joined to its inputs, so that every weight gets a gradient (of nothing) on this rank as on the others.
            return rest + 0.0 * (q.sum() + k.sum() + v.sum())
        return torch.cat([self.inner.attend(layer, q[:n], k[:n], v[:n], form), rest])


def padded(packed: PackedBatch, multiple: int) -> PackedBatch:
    tokens = packed.tokens.shape[0]
    more = -tokens % multiple
    if not more:
        return packed
    zeros = packed.tokens.new_zeros(more)
    return replace(
        packed,
        tokens=torch.cat([packed.tokens, zeros]),
        positions=torch.cat([packed.positions, zeros]),
        context=Padded(packed.context, tokens),
    )


def filler(multiple: int, device: torch.device) -> PackedBatch:
    """A forward pass that learns nothing: a rank without samples keeps the others company in their collectives."""
    zeros, nothing = (torch.zeros(n, dtype=torch.long, device=device) for n in (multiple, 0))
    return PackedBatch(zeros, zeros.clone(), Padded(None, 0), nothing, nothing.clone(), nothing.clone(), 0)
