"""Packed attention through torch's variable-length flash kernel: no dense block, no mask, key/value heads not repeated.

Sequences are cut by cumulative lengths. Where queries are fewer than keys the kernel lines their ends up, so a response
that attends to its group's prompt is one sequence whose queries are the response and whose keys are both.
`tidemill.models.attention.packed` is the plain form; `benchmarks/gpu_learn.py` holds the two together on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

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


def causal(q: Tensor, k: Tensor, v: Tensor, queries: Spans, keys: Spans, scale: float, window: int | None) -> Tensor:
    """q (tokens, heads, dim), k and v (keys, kv_heads, dim); the last query of a sequence sees its last key."""
    out: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(
        q, k, v, queries.ends, keys.ends, queries.longest, keys.longest, 0.0, True, False,
        scale=scale, window_size_left=-1 if window is None else window - 1, window_size_right=0,
    )  # fmt: skip
    return out[0]


Kernel = Callable[[Tensor, Tensor, Tensor, Spans, Spans, float, int | None], Tensor]


class FlashPacked:
    """Every sample sees itself alone, causally."""

    def __init__(
        self, lengths: Sequence[int], device: torch.device, kernel: Kernel = causal, is_traced: bool = True
    ) -> None:
        self.kernel, self.is_traced = kernel, is_traced
        # A sample of one token has no input, and the kernel's backward pass leaves empty sequences unwritten.
        self.spans = Spans.of([n for n in lengths if n], device)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        return self.kernel(q, k, v, self.spans, self.spans, scale, window)


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
        self.prompts = Spans.of(prompts, device)
        kept = [i for i, n in enumerate(responses) if n]
        self.responses = Spans.of([responses[i] for i in kept], device) if kept else None
        self.keys = Spans.of([prompts[group[i]] + responses[i] for i in kept], device) if kept else None
        self.seen = upload(_seen(prompts, responses, group, kept), device) if kept else None

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        n = self.split
        out = self.kernel(q[:n], k[:n], v[:n], self.prompts, self.prompts, scale, window)
        if self.responses is None or self.keys is None:
            return out
        keys, values = (_Gather.apply(x, self.seen) for x in (k, v))  # type: ignore[no-untyped-call]
        return torch.cat([out, self.kernel(q[n:], keys, values, self.responses, self.keys, scale, window)])


def _seen(prompts: Sequence[int], responses: Sequence[int], group: Sequence[int], kept: Sequence[int]) -> Any:
    """The packed tokens that each response sees, response after response: its prompt, then itself."""
    prompt_at = np.concatenate([[0], np.cumsum(prompts)])
    own_at = prompt_at[-1] + np.concatenate([[0], np.cumsum(responses)])
    parts = []
    for i in kept:
        g = group[i]
        parts += [np.arange(prompt_at[g], prompt_at[g + 1]), np.arange(own_at[i], own_at[i + 1])]
    return np.concatenate(parts)


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
