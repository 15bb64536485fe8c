"""Log-probability and entropy of tokens where each rank holds some rows of the output layer.

As in `learn.logprob`, logits exist for a chunk of tokens at a time, and here for this rank's words only. What ranks
exchange is four numbers a token: the largest logit, then the sums of e^x, of x · e^x, and the target's logit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from tidemill.learn.logprob.tokens import Words, bounded, can_fuse, scored
from tidemill.learn.parallel.collectives import MeshLink


def vocabulary_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    first: int,
    over: MeshLink,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    bias: Tensor | None = None,
    chunk: int = 4096,
) -> tuple[Tensor, Tensor]:
    """hidden (tokens, width), the same on all ranks; head (own words, width), whose first word is `first`.

    The gradient of `hidden` is this rank's part; whoever gathered it adds the parts up.
    """
    words = OwnWords(temperature, softcap, can_fuse(hidden) and head.shape[0] > 0, first, over=over)
    return scored(hidden, head, bias, targets, words, chunk)


@dataclass(frozen=True, slots=True)
class OwnWords(Words):
    """This rank's of the vocabulary. The gradient of their logits is as if there were no others."""

    over: MeshLink = field(kw_only=True)

    def statistics(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, targets = bounded(logits, self.temperature, self.softcap), targets - self.first
        rows = logits.shape[0]
        largest = logits.amax(-1) if logits.shape[1] else logits.new_full((rows,), float("-inf"))
        self.over.all_reduce(largest, dist.ReduceOp.MAX)
        shifted = logits - largest[:, None]
        e = shifted.exp()
        found, is_mine = _own(shifted, targets)
        sums = torch.stack([e.sum(-1), (e * shifted).sum(-1), torch.where(is_mine, found, 0.0)])
        self.over.all_reduce(sums)
        log_sum = sums[0].log()
        return sums[2] - log_sum, log_sum - sums[1] / sums[0], largest + log_sum


def _own(x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The target's column where this rank has it, anything elsewhere; and where it has it."""
    is_mine = (targets >= 0) & (targets < x.shape[1])
    if not x.shape[1]:
        return x.new_zeros(x.shape[0]), is_mine
    return x.gather(1, targets.clamp(0, x.shape[1] - 1)[:, None])[:, 0], is_mine
