"""Log-probability and entropy of tokens from hidden states, in chunks: full logits never exist, forward or backward.

A chunk is some tokens and all words, or all tokens and some words. Of tokens, the output layer's gradient is a sum over
chunks; of words, that of the hidden states is, and the other comes out whole: less to add up wherever a pass has fewer
tokens than the vocabulary has words, and no float32 copy of the output layer.

On accelerators with Triton the softmax part is one pass over a chunk's logits (`triton_logprob`), and 16-bit products
come out in float32, so that a logit is rounded nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tidemill.device import has_triton
from tidemill.learn.logprob.chunks import words_at_once


def token_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    bias: Tensor | None = None,
    chunk: int = 4096,
    fused: bool | None = None,
    by_words: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden (tokens, width), head (vocabulary, width), targets (tokens,) → their log-probability and entropy.

    As many logits exist at once as `chunk` tokens have. `fused`: use the Triton kernels; None: where they can be used.
    `by_words`: chunks are of words; None: with the kernels, where tokens are fewer than words.
    """
    words = Words(temperature, softcap, can_fuse(hidden) if fused is None else fused)
    if by_words is None:
        by_words = words.is_fused and hidden.shape[0] < head.shape[0]
    if not by_words:
        return scored(hidden, head, bias, targets, words, chunk)
    scores: tuple[Tensor, Tensor] = _ByWords.apply(  # type: ignore[no-untyped-call]
        hidden, head, bias, targets, words, words_at_once(hidden.shape[0], head.shape[0], chunk)
    )
    return scores


def can_fuse(x: Tensor) -> bool:
    return has_triton(x.device.type)


def scored(
    hidden: Tensor, head: Tensor, bias: Tensor | None, targets: Tensor, words: Words, chunk: int
) -> tuple[Tensor, Tensor]:
    scores: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head, bias, targets, words, chunk
    )
    return scores


@dataclass(frozen=True, slots=True)
class Words:
    """What becomes of a chunk's raw logits (tokens, words), there and back. Here of all words at once; where ranks
    share them out, `learn.logprob.vocabulary` has its own."""

    temperature: float
    softcap: float | None
    is_fused: bool
    first: int = 0  # of the words that these logits are of: targets count from there

    def statistics(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.is_fused:
            return statistics(logits, targets, self.temperature, self.softcap)
        sums = no_words(logits)
        self.fold(sums, logits, targets)
        return finished(sums)

    def fold(self, sums: Tensor, logits: Tensor, targets: Tensor) -> None:
        """Take more words into sums (4, tokens): the largest logit x so far, Σ e^(x - largest), Σ x e^(x - largest),
        the target's x. A target may be none of these words."""
        _fold(self.is_fused)(sums, logits, targets, self.temperature, self.softcap)

    def gradient(
        self, logits: Tensor, targets: Tensor, log_z: Tensor, entropy: Tensor, grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        """The same for some words as for all: log_z and entropy are of all words."""
        return _gradient(self.is_fused)(  # type: ignore[no-any-return]
            logits, targets - self.first, log_z, entropy, grad_logprobs, grad_entropy,
            self.temperature, self.softcap, dtype,
        )  # fmt: skip


def reference_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The plain form, with all logits at once: what the chunked one must equal."""
    logprobs = ((hidden @ head.T).float() / temperature).log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        words: Words,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # an unused entropy costs nothing in the backward pass
        parts = [
            words.statistics(_logits(h, head, bias), t)
            for h, t in zip(torch.split(hidden, chunk), torch.split(targets, chunk))
        ]
        logprobs, entropy, log_z = (torch.cat(part) for part in zip(*parts))
        ctx.save_for_backward(hidden, head, bias, targets, log_z, entropy)
        ctx.settings = (words, chunk)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head, bias, targets, log_z, entropy = ctx.saved_tensors
        words, chunk = ctx.settings
        wants_hidden, wants_head, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # Sums over chunks are kept in float32: a 16-bit sum would lose small chunks.
        grad_head = torch.zeros_like(head, dtype=_wide(head.dtype)) if wants_head else None
        grad_bias = torch.zeros_like(bias, dtype=_wide(bias.dtype)) if wants_bias else None
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            h = hidden[part]
            grad = words.gradient(
                _logits(h, head, bias), targets[part], log_z[part], entropy[part],
                None if grad_logprobs is None else grad_logprobs[part].contiguous(),
                None if grad_entropy is None else grad_entropy[part].contiguous(),
                h.dtype,
            )  # fmt: skip
            if grad_hidden is not None:
                torch.mm(grad, head, out=grad_hidden[part])
            if grad_head is not None:
                grad_head += _wide_product(grad.t(), h)
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=grad_bias.dtype)
        head_out = None if grad_head is None else grad_head.to(head.dtype)
        bias_out = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, head_out, bias_out, None, None, None


class _ByWords(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        words: Words,
        count: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        sums = no_words(hidden)
        for part in _parts(head.shape[0], count):
            words.fold(sums, _logits(hidden, head[part], _of(bias, part)), targets - part.start)
        logprobs, entropy, log_z = finished(sums)
        ctx.save_for_backward(hidden, head, bias, targets, log_z, entropy)
        ctx.settings = (words, count)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head, bias, targets, log_z, entropy = ctx.saved_tensors
        words, count = ctx.settings
        wants_hidden, wants_head, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=_wide(hidden.dtype)) if wants_hidden else None
        grad_head = torch.empty_like(head) if wants_head else None
        grad_bias = torch.empty_like(bias) if wants_bias else None
        given = [None if g is None else g.contiguous() for g in (grad_logprobs, grad_entropy)]
        for part in _parts(head.shape[0], count):
            grad = words.gradient(
                _logits(hidden, head[part], _of(bias, part)), targets - part.start, log_z, entropy, *given, hidden.dtype
            )
            if grad_hidden is not None:
                grad_hidden += _wide_product(grad, head[part])
            if grad_head is not None:
                torch.mm(grad.t(), hidden, out=grad_head[part])
            if grad_bias is not None:
                grad_bias[part] = grad.sum(0, dtype=_wide(grad.dtype))
            del grad  # before the next chunk's logits
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_head, grad_bias, None, None, None


def _parts(length: int, count: int) -> list[slice]:
    return [slice(start, min(start + count, length)) for start in range(0, length, count)]


def _of(bias: Tensor | None, part: slice) -> Tensor | None:
    return None if bias is None else bias[part]


def statistics(
    logits: Tensor, targets: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, vocabulary) raw logits → log-probability of the target, entropy, log of the normaliser."""
    logits = bounded(logits, temperature, softcap)
    log_z = logits.logsumexp(-1)
    p = (logits - log_z[:, None]).exp_()
    return logits.gather(1, targets[:, None])[:, 0] - log_z, log_z - (p * logits).sum(-1), log_z


def no_words(rows: Tensor) -> Tensor:
    """What `fold` begins with, for as many tokens as there are rows."""
    sums = torch.zeros((4, rows.shape[0]), dtype=_wide(rows.dtype), device=rows.device)
    sums[0] = float("-inf")
    return sums


def finished(sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `statistics` gives, from the sums over all words."""
    largest, total, weighted, chosen = sums.unbind()
    log_z = largest + total.log()
    return chosen - log_z, log_z - weighted / total, log_z


def fold(sums: Tensor, logits: Tensor, targets: Tensor, temperature: float, softcap: float | None) -> None:
    logits = bounded(logits, temperature, softcap)
    largest = torch.maximum(sums[0], logits.amax(-1))
    sums[1:3] *= (sums[0] - largest).exp()
    sums[0] = largest
    e = (logits - largest[:, None]).exp()
    sums[1] += e.sum(-1)
    sums[2] += (e * logits).sum(-1)
    is_here = (targets >= 0) & (targets < logits.shape[1])
    found = logits.gather(1, targets.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    sums[3] = torch.where(is_here, found, sums[3])


def logit_gradient(
    logits: Tensor, targets: Tensor, log_z: Tensor, entropy: Tensor, grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None, temperature: float, softcap: float | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Of the raw logits, from the gradients of what `statistics` gave. A target may be none of these words."""
    logits = bounded(logits, temperature, softcap)
    logp = logits - log_z[:, None]
    p = logp.exp()
    grad = torch.zeros_like(p)
    if grad_logprobs is not None:
        grad -= p * grad_logprobs[:, None]
        is_here, last = (targets >= 0) & (targets < logits.shape[1]), logits.shape[1] - 1
        if last >= 0:
            grad.scatter_add_(1, targets.clamp(0, last)[:, None], torch.where(is_here, grad_logprobs, 0.0)[:, None])
    if grad_entropy is not None:
        # dH/dlogit = -p (log p + H)
        grad -= grad_entropy[:, None] * p * (logp + entropy[:, None])
    if softcap is not None:
        grad *= 1 - (logits * temperature / softcap) ** 2
    return (grad / temperature).to(dtype)


def _fold(fused: bool) -> Any:
    if not fused:
        return fold
    from tidemill.learn.logprob import triton_logprob

    return triton_logprob.fold


def _gradient(fused: bool) -> Any:
    if not fused:
        return logit_gradient
    from tidemill.learn.logprob import triton_logprob

    return triton_logprob.logit_gradient


def _logits(h: Tensor, head: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return _wide_product(h, head.t()).float()
    return torch.nn.functional.linear(h, head, bias).float()


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32 where the inputs are 16-bit and the device can; the products are float32 inside anyway."""
    if a.device.type == "cpu" or a.dtype not in (torch.bfloat16, torch.float16):
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def bounded(logits: Tensor, temperature: float, softcap: float | None) -> Tensor:
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits if temperature == 1.0 else logits / temperature
