"""The softmax part of log-probabilities as Triton kernels: one pass over the logits forward, one backward.

`tidemill.learn.logprob.tokens` holds the plain forms (`fold`, `logit_gradient`) that these must equal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FORWARD_BLOCK, BACKWARD_BLOCK, WARPS = 4096, 2048, 8


@triton.jit
def _bounded(x, cap, inverse_temperature, HAS_CAP: tl.constexpr):
    if HAS_CAP:
        x = cap * (2 * tl.sigmoid(2 * x / cap) - 1)  # cap · tanh(x / cap)
    return x * inverse_temperature


@triton.jit
def _fold(
    logits, targets, sums, rows, vocabulary, cap, inverse_temperature, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start_of_row = logits + row.to(tl.int64) * vocabulary
    largest = tl.load(sums + row)
    total = tl.load(sums + rows + row)
    weighted = tl.load(sums + 2 * rows + row)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < vocabulary
        x = tl.load(start_of_row + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(inside, _bounded(x, cap, inverse_temperature, HAS_CAP), float("-inf"))
        new = tl.maximum(largest, tl.max(x, 0))
        shrink = tl.exp(largest - new)
        e = tl.exp(x - new)
        total = total * shrink + tl.sum(e, 0)
        weighted = weighted * shrink + tl.sum(tl.where(inside, e * x, 0.0), 0)
        largest = new
    tl.store(sums + row, largest)
    tl.store(sums + rows + row, total)
    tl.store(sums + 2 * rows + row, weighted)
    target = tl.load(targets + row)
    if (target >= 0) & (target < vocabulary):
        chosen = tl.load(start_of_row + target).to(tl.float32)
        tl.store(sums + 3 * rows + row, _bounded(chosen, cap, inverse_temperature, HAS_CAP))


@triton.jit
def _gradient(
    logits, out, targets, log_z, entropy, grad_logprobs, grad_entropy, vocabulary, cap, inverse_temperature,
    HAS_CAP: tl.constexpr, HAS_LOGPROBS: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocabulary
    place = row.to(tl.int64) * vocabulary + at
    x = _bounded(tl.load(logits + place, mask=inside, other=0.0).to(tl.float32), cap, inverse_temperature, HAS_CAP)
    logp = x - tl.load(log_z + row)
    p = tl.exp(logp)
    grad = tl.zeros((BLOCK,), tl.float32)
    if HAS_LOGPROBS:
        g = tl.load(grad_logprobs + row)
        grad += tl.where(at == tl.load(targets + row), g, 0.0) - p * g
    if HAS_ENTROPY:
        grad -= tl.load(grad_entropy + row) * p * (logp + tl.load(entropy + row))
    if HAS_CAP:
        share = x / (inverse_temperature * cap)
        grad *= 1 - share * share
    tl.store(out + place, (grad * inverse_temperature).to(out.dtype.element_ty), mask=inside)


def fold(sums: Tensor, logits: Tensor, targets: Tensor, temperature: float, softcap: float | None) -> None:
    rows, vocabulary = logits.shape
    _fold[(rows,)](
        logits, targets, sums, rows, vocabulary, softcap or 0.0, 1.0 / temperature, HAS_CAP=softcap is not None,
        BLOCK=FORWARD_BLOCK, num_warps=WARPS,
    )  # fmt: skip


def logit_gradient(
    logits: Tensor, targets: Tensor, log_z: Tensor, entropy: Tensor, grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None, temperature: float, softcap: float | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    rows, vocabulary = logits.shape
    out = torch.empty((rows, vocabulary), dtype=dtype, device=logits.device)
    _gradient[(rows, triton.cdiv(vocabulary, BACKWARD_BLOCK))](
        logits, out, targets, log_z, entropy,
        log_z if grad_logprobs is None else grad_logprobs, log_z if grad_entropy is None else grad_entropy,
        vocabulary, softcap or 0.0, 1.0 / temperature,
        HAS_CAP=softcap is not None, HAS_LOGPROBS=grad_logprobs is not None, HAS_ENTROPY=grad_entropy is not None,
        BLOCK=BACKWARD_BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return out
