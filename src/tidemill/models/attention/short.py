"""Attention over packed sequences that are short, for float32 on a CPU (`short.c`): no padding, no copies into blocks.

torch's kernel is made for long sequences. Of a small model's learning step with answers of tens of tokens it takes an
eighth, and gathering its dense blocks as much again. What this does not know (windows, caps, long sequences, other
tensors) goes to the plain form, `tidemill.models.attention.packed`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.batch import Array
from tidemill.device.compiled import library, threads_for
from tidemill.errors import TidemillError
from tidemill.models.attention.packed import Packed, SharedPrompt
from tidemill.models.attention.registry import AttentionForm, Context

SOURCE = Path(__file__).with_name("short.c")
LONGEST = 256  # tokens that one may see; with more, torch's kernel is as fast or faster

_POINTERS = ("q", "k", "v", "dout", "out", "top", "dq", "dk", "dv", "families", "sequences")
_NUMBERS = ("heads", "kv_heads", "dim", "v_dim", "longest")


class _Job(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS]
        + [(name, ctypes.c_int64) for name in _NUMBERS]
        + [("scale", ctypes.c_float)]
    )


@cache
def _library() -> ctypes.CDLL | None:
    found = library(SOURCE)
    if found is not None:
        found.tm_short.argtypes = [ctypes.POINTER(_Job), ctypes.c_int64, ctypes.c_int, ctypes.c_int]
        found.tm_short.restype = ctypes.c_int
    return found


def works_on(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype == torch.float32 and _library() is not None


class Families:
    """Who continues whom. `sequences`: start, length, and the same of what is continued; a family's lie together, what
    they continue first."""

    def __init__(self, families: Sequence[int], sequences: Array) -> None:
        self.families = np.ascontiguousarray(families, np.int64)
        self.sequences = np.ascontiguousarray(sequences, np.int64)
        self.longest = int((self.sequences[:, 1] + self.sequences[:, 3]).max(initial=0))

    @property
    def count(self) -> int:
        return len(self.families) - 1

    @classmethod
    def alone(cls, lengths: Sequence[int]) -> Families:
        ends = np.cumsum(lengths)
        nothing = np.zeros_like(ends)
        return cls(range(len(lengths) + 1), np.stack([ends - lengths, lengths, nothing, nothing], 1))

    @classmethod
    def shared(cls, prompts: Sequence[int], responses: Sequence[int], group: Sequence[int]) -> Families:
        prompt_ends, ends, nothing = np.cumsum(prompts), sum(prompts) + np.cumsum(responses), [0] * len(prompts)
        continued = np.asarray(group, np.int64)
        first = np.stack([prompt_ends - prompts, prompts, nothing, nothing], 1)
        lengths = np.asarray(prompts, np.int64)
        rest = np.stack([ends - responses, responses, (prompt_ends - prompts)[continued], lengths[continued]], 1)
        order = np.argsort(np.concatenate([np.arange(len(prompts)), continued]), kind="stable")
        members = 1 + np.bincount(continued, minlength=len(prompts))
        return cls([0, *np.cumsum(members).tolist()], np.concatenate([first, rest])[order])


class _Short(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, families: Families, scale: float) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, top = q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2])
        _run(families, scale, False, q=q, k=k, v=v, out=out, top=top)
        ctx.save_for_backward(q, k, v, top)
        ctx.families, ctx.scale = families, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, top = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        given = {"q": q, "k": k, "v": v, "top": top, "dout": dout.contiguous(), "dq": dq, "dk": dk, "dv": dv}
        _run(ctx.families, ctx.scale, True, **given)
        return dq, dk, dv, None, None


def _run(families: Families, scale: float, is_backward: bool, **tensors: Tensor) -> None:
    code, (_, heads, dim), (_, kv_heads, v_dim) = _library(), tensors["q"].shape, tensors["v"].shape
    assert code is not None
    job = _Job(
        families=families.families.ctypes.data, sequences=families.sequences.ctypes.data, heads=heads,
        kv_heads=kv_heads, dim=dim, v_dim=v_dim, longest=families.longest, scale=scale,
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
    )  # fmt: skip

    units = families.count * kv_heads  # a unit is a whole prompt with its responses
    if code.tm_short(ctypes.byref(job), units, int(is_backward), threads_for(units, least=4)):
        raise TidemillError("attention found no memory", "fewer train.tokens_per_microbatch need less")


def attend(families: Families, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    made: Tensor = _Short.apply(q, k, v, families, scale)  # type: ignore[no-untyped-call]
    return made


def _fits(families: Families, q: Tensor, form: AttentionForm) -> bool:
    is_seen_whole = all(n is None or n >= families.longest for n in (form.window, form.chunk))
    is_plain = form.softcap is None and form.sinks is None
    return is_seen_whole and is_plain and families.longest <= LONGEST and works_on(q.device, q.dtype)


class Short:
    """Implements `attention.Context`. What does not fit goes to the plain context, made when first needed."""

    def __init__(self, families: Families, make_plain: Callable[[], Context]) -> None:
        self.families, self.make_plain = families, make_plain

    @cached_property
    def plain(self) -> Context:
        return self.make_plain()

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
        if not _fits(self.families, q, form):
            return self.plain.attend(layer, q, k, v, form)
        return attend(self.families, q, k, v, form.scale)


def packed(lengths: Sequence[int], device: torch.device) -> Short:
    """As `Packed`."""
    return Short(Families.alone(lengths), partial(Packed, lengths, device))


def shared(prompts: Sequence[int], responses: Sequence[int], group: Sequence[int], device: torch.device) -> Short:
    """As `SharedPrompt`."""
    return Short(Families.shared(prompts, responses, group), partial(SharedPrompt, prompts, responses, group, device))
