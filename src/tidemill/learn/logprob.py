"""Log-probability and entropy of tokens from hidden states, in chunks: full logits never exist, forward or backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def token_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    bias: Tensor | None = None,
    chunk: int = 4096,
) -> tuple[Tensor, Tensor]:
    """hidden (tokens, width), head (vocabulary, width), targets (tokens,) → their log-probability and entropy."""
    scores: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head, bias, targets, temperature, softcap, chunk
    )
    return scores


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
        temperature: float,
        softcap: float | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # an unused entropy costs nothing in the backward pass
        tokens = hidden.shape[0]
        logprobs = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
        entropy, log_z = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for start in range(0, tokens, chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], head, bias, temperature, softcap)
            log_z[part] = logits.logsumexp(-1)
            logprobs[part] = logits.gather(1, targets[part, None])[:, 0] - log_z[part]
            p = (logits - log_z[part, None]).exp_()
            entropy[part] = log_z[part] - (p * logits).sum(-1)
        ctx.save_for_backward(hidden, head, bias, targets, log_z, entropy)
        ctx.settings = (temperature, softcap, chunk)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head, bias, targets, log_z, entropy = ctx.saved_tensors
        temperature, softcap, chunk = ctx.settings
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            h = hidden[part]
            logits = _logits(h, head, bias, temperature, softcap)
            logp = logits - log_z[part, None]
            p = logp.exp()
            grad = torch.zeros_like(p)
            if grad_logprobs is not None:
                grad -= p * grad_logprobs[part, None]
                grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            if grad_entropy is not None:
                # dH/dlogit = -p (log p + H)
                grad -= grad_entropy[part, None] * p * (logp + entropy[part, None])
            if softcap is not None:
                grad *= 1 - (logits * temperature / softcap) ** 2
            grad = (grad / temperature).to(h.dtype)
            grad_hidden[part] = grad @ head
            grad_head += grad.T @ h
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return grad_hidden, grad_head, grad_bias, None, None, None, None


def _logits(h: Tensor, head: Tensor, bias: Tensor | None, temperature: float, softcap: float | None) -> Tensor:
    logits = torch.nn.functional.linear(h, head, bias).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits if temperature == 1.0 else logits / temperature
