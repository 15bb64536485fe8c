"""Log-probability and entropy of tokens where each rank holds some rows of the output layer.

As in `learn.logprob`, logits exist for a chunk of tokens at a time, and here for this rank's words only. What ranks
exchange is four numbers a token: the largest logit, then the sums of e^x, of x · e^x, and the target's logit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tidemill.learn.logprob import _bounded, _logits, _wide, _wide_product
from tidemill.learn.parallel.collectives import Link


def vocabulary_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    first: int,
    over: Link,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    bias: Tensor | None = None,
    chunk: int = 4096,
) -> tuple[Tensor, Tensor]:
    """hidden (tokens, width), the same on all ranks; head (own words, width), whose first word is `first`.

    The gradient of `hidden` is this rank's part; whoever gathered it adds the parts up.
    """
    scores: tuple[Tensor, Tensor] = _VocabularyLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head, bias, targets, first, over, temperature, softcap, chunk
    )
    return scores


class _VocabularyLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        first: int,
        over: Link,
        temperature: float,
        softcap: float | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        parts = [
            statistics(_logits(h, head, bias), t - first, over, temperature, softcap)
            for h, t in zip(torch.split(hidden, chunk), torch.split(targets, chunk))
        ]
        logprobs, entropy, log_z = (torch.cat(part) for part in zip(*parts))
        ctx.save_for_backward(hidden, head, bias, targets, log_z, entropy)
        ctx.settings = (first, temperature, softcap, chunk)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head, bias, targets, log_z, entropy = ctx.saved_tensors
        first, temperature, softcap, chunk = ctx.settings
        grad_hidden = torch.zeros_like(hidden)
        grad_head = torch.zeros_like(head, dtype=_wide(head.dtype))
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=_wide(bias.dtype))
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            h = hidden[part]
            grad = logit_gradient(
                _logits(h, head, bias), targets[part] - first, log_z[part], entropy[part],
                None if grad_logprobs is None else grad_logprobs[part],
                None if grad_entropy is None else grad_entropy[part],
                temperature, softcap,
            ).to(h.dtype)  # fmt: skip
            grad_hidden[part] = grad @ head
            grad_head += _wide_product(grad.t(), h)
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=grad_bias.dtype)
        bias_out = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_head.to(head.dtype), bias_out, None, None, None, None, None, None


def statistics(
    logits: Tensor, targets: Tensor, over: Link, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, own words) raw logits; `targets` count from this rank's first word and may lie outside."""
    logits = _bounded(logits, temperature, softcap)
    rows = logits.shape[0]
    largest = logits.amax(-1) if logits.shape[1] else logits.new_full((rows,), float("-inf"))
    over.all_reduce(largest, dist.ReduceOp.MAX)
    shifted = logits - largest[:, None]
    e = shifted.exp()
    found, is_mine = _own(shifted, targets)
    sums = torch.stack([e.sum(-1), (e * shifted).sum(-1), torch.where(is_mine, found, 0.0)])
    over.all_reduce(sums)
    log_sum = sums[0].log()
    return sums[2] - log_sum, log_sum - sums[1] / sums[0], largest + log_sum


def logit_gradient(
    logits: Tensor, targets: Tensor, log_z: Tensor, entropy: Tensor, grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None, temperature: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Of this rank's raw logits; the same formula as for all words, for log_z and entropy are of all words."""
    logits = _bounded(logits, temperature, softcap)
    logp = logits - log_z[:, None]
    p = logp.exp()
    grad = torch.zeros_like(p)
    if grad_logprobs is not None:
        grad -= p * grad_logprobs[:, None]
        is_mine = (targets >= 0) & (targets < logits.shape[1])
        mine = is_mine.nonzero()[:, 0]
        grad[mine, targets[mine]] += grad_logprobs[mine]
    if grad_entropy is not None:
        grad -= grad_entropy[:, None] * p * (logp + entropy[:, None])
    if softcap is not None:
        grad *= 1 - (logits * temperature / softcap) ** 2
    return grad / temperature


def _own(x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The target's column where this rank has it, anything elsewhere; and where it has it."""
    is_mine = (targets >= 0) & (targets < x.shape[1])
    if not x.shape[1]:
        return x.new_zeros(x.shape[0]), is_mine
    return x.gather(1, targets.clamp(0, x.shape[1] - 1)[:, None])[:, 0], is_mine
