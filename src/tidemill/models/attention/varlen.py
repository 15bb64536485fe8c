"""Packed attention through torch's variable-length flash kernel: no dense block, no mask, key/value heads not repeated.

Sequences are cut by cumulative lengths. Where queries are fewer than keys the kernel lines their ends up, so a response
that attends to its group's prompt is one sequence whose queries are the response and whose keys are both.
`tidemill.models.attention.packed` is the plain form; `benchmarks/gpu_learn.py` holds the two together on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.models.attention.registry import AttentionForm
from tidemill.models.upload import upload

OPERATOR = "aten::_flash_attention_forward"
MOST_DIM = 256  # of a head
SHORTEST = 128  # tokens: the kernel takes so many at a time


def works_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has the kernel for this device, and the kernel takes this dtype."""
    key = torch._C._dispatch_key_for_device(device.type)
    has_kernel: bool = torch._C._dispatch_has_kernel_for_dispatch_key(OPERATOR, key)
    return has_kernel and dtype in (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Spans:
    """Sequences one after another: where each ends, for the kernel, and the longest."""

    ends: Tensor  # (sequences + 1,) int32, from 0
    longest: int  # or more: rounded up, so that batches differ little in it and compiled layers serve them all
    host: tuple[int, ...]  # the ends, for operators that take them as numbers

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> Spans:
        ends = np.cumsum(lengths)
        longest = max(SHORTEST, 1 << (max(lengths) - 1).bit_length())
        return Spans(upload(np.concatenate([[0], ends]), device, np.int32), longest, tuple(ends.tolist()))


def causal(q: Tensor, k: Tensor, v: Tensor, queries: Spans, keys: Spans, form: AttentionForm) -> Tensor:
    """q (tokens, heads, dim), k and v (keys, kv_heads, dim); the last query of a sequence sees its last key."""
    if form.sinks is not None:
        sunk: Tensor = WithSinks.apply(q, k, v, form.sinks, queries, keys, form.scale, _left(form))  # type: ignore[no-untyped-call]
        return sunk
    return _forward(q, k, v, queries, keys, form.scale, _left(form))[0]


def _left(form: AttentionForm) -> int:
    """How many keys before its own a query sees, as the kernel wants it."""
    return -1 if form.window is None else form.window - 1


def _forward(q: Tensor, k: Tensor, v: Tensor, queries: Spans, keys: Spans, scale: float, left: int) -> Sequence[Tensor]:
    """The output, the log of each query's normaliser (heads, tokens), and what the backward pass wants beside them."""
    made: Sequence[Tensor] = torch.ops.aten._flash_attention_forward(
        q, k, v, queries.ends, keys.ends, queries.longest, keys.longest, 0.0, True, False,
        scale=scale, window_size_left=left, window_size_right=0,
    )  # fmt: skip
    return made


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_z: Tensor, queries: Spans, keys: Spans,
    seed: Sequence[Tensor], scale: float, left: int,
) -> Sequence[Tensor]:  # fmt: skip
    made: Sequence[Tensor] = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, log_z, queries.ends, keys.ends, queries.longest, keys.longest, 0.0, True, *seed,
        scale=scale, window_size_left=left, window_size_right=0,
    )  # fmt: skip
    return made


class WithSinks(torch.autograd.Function):
    """A sink is a score more in each query's normaliser. With z of what is seen and s of the sink the output shrinks by
    z / (z + s). Given that output and log (z + s), the kernel's own backward pass gives the gradients of q, k and v."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, queries: Spans, keys: Spans, scale: float, left: int
    ) -> Tensor:
        out, log_z, *seed = _forward(q, k, v, queries, keys, scale, left)[:4]
        both = torch.logaddexp(log_z, sinks.float().unsqueeze(1))  # (heads, tokens)
        out = (out * (log_z - both).exp().t().unsqueeze(-1)).to(out.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, both, *seed)
        ctx.how = (queries, keys), (scale, left)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, both, *seed = ctx.saved_tensors
        spans, how = ctx.how
        queries, keys = spans
        grads = _backward(grad.contiguous(), q, k, v, out, both, queries, keys, seed, *how)[:3]
        share = (sinks.float().unsqueeze(1) - both).exp()  # of the softmax that went to the sink
        grad_sinks = -(share * (grad.float() * out.float()).sum(-1).t()).sum(1)
        return *grads, grad_sinks.to(sinks.dtype), None, None, None, None


Kernel = Callable[[Tensor, Tensor, Tensor, Spans, Spans, AttentionForm], Tensor]


def pieces(start: int, length: int, chunk: int | None) -> list[int]:
    """The lengths of the parts of positions `start … start + length` that lie in one chunk each."""
    if chunk is None:
        return [length]
    cuts = [start, *range((start // chunk + 1) * chunk, start + length, chunk), start + length]
    return [b - a for a, b in pairwise(cuts) if b > a]


class FlashPacked:
    """Every sample sees itself alone, causally."""

    def __init__(
        self, lengths: Sequence[int], device: torch.device, kernel: Kernel = causal, is_traced: bool = True
    ) -> None:
        self.kernel, self.is_traced = kernel, is_traced
        # A sample of one token has no input, and the kernel's backward pass leaves empty sequences unwritten.
        self.lengths, self.device = [n for n in lengths if n], device
        self.spans: dict[int | None, Spans] = {None: Spans.of(self.lengths, device)}

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
        if form.chunk not in self.spans:  # a chunk sees itself alone, as a sample does
            cut = [piece for n in self.lengths for piece in pieces(0, n, form.chunk)]
            self.spans[form.chunk] = Spans.of(cut, self.device)
        spans = self.spans[form.chunk]
        q, k, v = (x.contiguous() for x in (q, k, v))
        return self.kernel(q, k, v, spans, spans, form)


class FlashShared:
    """All prompts, then all responses; `group[i]` is the prompt that response i continues."""

    def __init__(
        self,
        prompts: Sequence[int],
        responses: Sequence[int],
        group: Sequence[int],
        device: torch.device,
        kernel: Kernel = causal,
        is_traced: bool = True,
    ) -> None:
        self.kernel, self.is_traced = kernel, is_traced
        self.split = sum(prompts)
        self.make_spans = partial(SharedSpans.of, prompts, responses, group, device)
        self.spans: dict[int | None, SharedSpans] = {None: self.make_spans(None)}

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
        if form.chunk not in self.spans:
            self.spans[form.chunk] = self.make_spans(form.chunk)
        spans, n = self.spans[form.chunk], self.split
        q, k, v = (x.contiguous() for x in (q, k, v))
        out = self.kernel(q[:n], k[:n], v[:n], spans.prompts, spans.prompts, form)
        if spans.responses is None or spans.keys is None:
            return out
        keys, values = (_Gather.apply(x, spans.seen) for x in (k, v))  # type: ignore[no-untyped-call]
        return torch.cat([out, self.kernel(q[n:], keys, values, spans.responses, spans.keys, form)])


@dataclass(frozen=True, slots=True)
class SharedSpans:
    """Prompts, and responses with the keys that they see; both in pieces where attention is chunked."""

    prompts: Spans
    responses: Spans | None  # None where no response has a token
    keys: Spans | None
    seen: Tensor | None  # the packed tokens that are seen, piece after piece: of the prompt, then of the response

    @staticmethod
    def of(
        prompts: Sequence[int], responses: Sequence[int], group: Sequence[int], device: torch.device, chunk: int | None
    ) -> SharedSpans:
        whole = Spans.of([piece for n in prompts for piece in pieces(0, n, chunk)], device)
        prompt_ends, own_at = np.cumsum(prompts), sum(prompts)
        queries, keys, seen = [], [], []
        for response, g in zip(responses, group):
            prompt, end, at = prompts[g], int(prompt_ends[g]), own_at
            own_at += response
            if not response:
                continue
            tail = prompt if chunk is None else prompt % chunk  # of the prompt, which the first piece sees
            for piece in pieces(prompt, response, chunk):
                queries.append(piece)
                keys.append(tail + piece)
                seen += [np.arange(end - tail, end), np.arange(at, at + piece)]
                at, tail = at + piece, 0
        if not queries:
            return SharedSpans(whole, None, None, None)
        return SharedSpans(
            whole, Spans.of(queries, device), Spans.of(keys, device), upload(np.concatenate(seen), device)
        )


class _Gather(torch.autograd.Function):
    """Rows by index; a row taken many times gets its gradients added in float32, not in the row's own dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        total = torch.zeros((ctx.rows, *grad.shape[1:]), dtype=torch.float32, device=grad.device)
        return total.index_add_(0, index, grad.float()).to(grad.dtype), None
