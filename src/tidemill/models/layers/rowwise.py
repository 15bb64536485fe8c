"""Batch-invariant arithmetic for float32 on a CPU: what a token's numbers are does not depend on what shares its batch.

Rollout reads a sample token by token among others, the learner reads it whole among others; ordinary matrix products
round differently for each number of rows. Under `Rowwise` both give the same bits: products and attention come from
`rowwise.c`, and functions whose vector form rounds unlike their scalar one see whole vectors only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tidemill.batch import Array
from tidemill.device.compiled import library, over_rows
from tidemill.errors import ConfigError
from tidemill.models.attention.packed import Packed, SharedPrompt
from tidemill.models.attention.registry import AttentionForm, Context

SOURCE = Path(__file__).with_name("rowwise.c")
# torch works on this many elements in one thread, and on vectors of at most this many.
GRAIN, VECTORS = 32768, 64

_POINTERS = ("q", "keys", "values", "table", "which", "length", "sinks", "out")
_NUMBERS = ("table_stride", "heads", "kv_heads", "dim", "v_dim", "page", "window", "chunk")


class _Attention(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS]
        + [(name, ctypes.c_int64) for name in _NUMBERS]
        + [("scale", ctypes.c_float), ("softcap", ctypes.c_float)]
    )


@cache
def _library() -> ctypes.CDLL:
    found = library(SOURCE)
    if found is None:
        raise ConfigError(
            "rollout.batch_invariant needs a C compiler, and none is here (or TIDEMILL_KERNELS=0 forbids it)",
            "install gcc or clang, or set rollout.batch_invariant=false",
        )
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    found.tm_rows_linear.argtypes = [pointer] * 4 + [number] * 4
    found.tm_rows_attend.argtypes = [ctypes.POINTER(_Attention), pointer, number, number]
    return found


def mode(wanted: bool, device: torch.device) -> AbstractContextManager[Any]:
    if not wanted:
        return nullcontext()
    if device.type != "cpu":
        raise ConfigError(
            f"rollout.batch_invariant works on a CPU; the model is on {device.type}",
            "set rollout.batch_invariant=false; docs/rollout.md says how near accelerators come",
        )
    return Rowwise()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (…, k), weight (n, k) → (…, n)"""
    flat, weight = x.reshape(-1, x.shape[-1]).contiguous(), weight.contiguous()
    rows, k = flat.shape
    n = weight.shape[0]
    out = torch.empty(rows, n)
    start = bias.data_ptr() if bias is not None else None
    over_rows(
        lambda a, b: _library().tm_rows_linear(flat.data_ptr(), weight.data_ptr(), start, out.data_ptr(), a, b, k, n),
        rows,
    )
    return out.view(*x.shape[:-1], n)


def attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Array, which: Array, length: Array, page: int, form: AttentionForm
) -> Tensor:
    """q (rows, heads, dim); row i sees `length[i]` tokens of sequence `which[i]`, whose token t lies at
    table[which[i], t // page] * page + t % page of keys and values (tokens, kv_heads, dim)."""
    q, keys, values = q.contiguous(), keys.contiguous(), values.contiguous()
    table, which, length = (np.ascontiguousarray(a, np.int64) for a in (table, which, length))
    (rows, heads, dim), (kv_heads, v_dim) = q.shape, values.shape[1:]
    out = torch.empty(rows, heads, v_dim)
    sinks = None if form.sinks is None else form.sinks.detach().contiguous()
    how = _Attention(
        q.data_ptr(), keys.data_ptr(), values.data_ptr(), table.ctypes.data, which.ctypes.data, length.ctypes.data,
        None if sinks is None else sinks.data_ptr(), out.data_ptr(), table.shape[1], heads, kv_heads, dim, v_dim, page,
        form.window or 0, form.chunk or 0, form.scale, form.softcap or 0.0,
    )  # fmt: skip

    def run(first: int, last: int) -> None:
        scratch = torch.empty(int(length.max()))
        _library().tm_rows_attend(ctypes.byref(how), scratch.data_ptr(), first, last)

    over_rows(run, rows)
    return out


def on_whole_vectors(function: Callable[..., Tensor], x: Tensor, *args: Any, **options: Any) -> Tensor:
    """An elementwise function, so that no element falls to the scalar form that ends a vector loop."""
    flat = x.reshape(-1)
    pieces = torch.split(F.pad(flat, (0, -flat.numel() % VECTORS)), GRAIN)
    return torch.cat([function(piece, *args, **options) for piece in pieces])[: flat.numel()].view(x.shape)


def logsumexp(x: Tensor) -> Tensor:
    """Over the last dimension."""
    padded = F.pad(x, (0, -x.shape[-1] % VECTORS), value=float("-inf"))
    peak = padded.amax(-1, keepdim=True)
    total = on_whole_vectors(torch.exp, padded - peak).sum(-1)
    return on_whole_vectors(torch.log, total) + peak.squeeze(-1)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        return grad @ weight, flat.t() @ x.reshape(-1, x.shape[-1]), flat.sum(0) if ctx.has_bias else None


class _Instead(torch.autograd.Function):
    """The value of one tensor with the gradient of another."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, carrier: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    if b.dim() != 2 or a.dtype != torch.float32:
        return torch.Tensor.matmul(a, b)
    return cast(Tensor, _Linear.apply(a, b.t(), None))  # type: ignore[no-untyped-call]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return cast(Tensor, _Linear.apply(x, weight, bias))  # type: ignore[no-untyped-call]


def _logsumexp(x: Tensor, dim: Any = -1, keepdim: bool = False) -> Tensor:
    assert dim in (-1, x.dim() - 1), "only the vocabulary's dimension is summed over here"
    out = logsumexp(x)
    return out.unsqueeze(-1) if keepdim else out


_PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    F.linear: _linear, torch.matmul: _matmul, torch.Tensor.matmul: _matmul, torch.Tensor.__matmul__: _matmul,
    torch.logsumexp: _logsumexp, torch.Tensor.logsumexp: _logsumexp,
}  # fmt: skip
_ELEMENTWISE = {
    F.silu, F.gelu, torch.tanh, torch.Tensor.tanh, torch.sigmoid, torch.Tensor.sigmoid, torch.exp, torch.Tensor.exp,
    torch.cos, torch.Tensor.cos, torch.sin, torch.Tensor.sin,
}  # fmt: skip


class Rowwise(TorchFunctionMode):
    """While it is entered, the functions above stand in for torch's."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            return _PRODUCTS[func](*args, **kwargs)
        if func in _ELEMENTWISE:
            options = {name: value for name, value in kwargs.items() if name != "inplace"}
            return on_whole_vectors(func, *args, **options)
        return func(*args, **kwargs)


class RowwiseContext:
    """Implements `attention.Context` for packed samples: values from `attention`, gradients from the plain context."""

    def __init__(self, plain: Context, sequences: Sequence[Array], rows: Sequence[tuple[int, int]]) -> None:
        """`sequences`: the rows of the batch that each sequence consists of, in order; `rows`: for each row of the
        batch, a sequence it belongs to and how many of its tokens it sees."""
        self.plain = plain
        self.table = np.zeros((len(sequences), max(len(s) for s in sequences)), np.int64)
        for i, sequence in enumerate(sequences):
            self.table[i, : len(sequence)] = sequence
        self.which, self.length = np.array(rows, np.int64).T

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
        with torch.no_grad():
            out = attention(q, k, v, self.table, self.which, self.length, 1, form)
        if not q.requires_grad:
            return out
        carrier = self.plain.attend(layer, q, k, v, form)
        return cast(Tensor, _Instead.apply(out, carrier))  # type: ignore[no-untyped-call]


def packed(lengths: Sequence[int], device: torch.device) -> Context:
    starts = np.cumsum([0, *lengths])
    sequences = [np.arange(a, b) for a, b in pairwise(starts)]
    rows = [(i, t + 1) for i, n in enumerate(lengths) for t in range(n)]
    return RowwiseContext(Packed(lengths, device), sequences, rows)


def shared(prompts: Sequence[int], responses: Sequence[int], prompt_of: Sequence[int], device: torch.device) -> Context:
    """Prompts one after another, then responses; a response goes on where its prompt ends."""
    starts = np.cumsum([0, *prompts, *responses])
    own = [np.arange(a, b) for a, b in pairwise(starts)]
    count = len(prompts)
    sequences = [*own[:count], *(np.concatenate([own[p], own[count + i]]) for i, p in enumerate(prompt_of))]
    rows = [(i, t + 1) for i, n in enumerate(prompts) for t in range(n)]
    rows += [(count + i, prompts[p] + t + 1) for i, p in enumerate(prompt_of) for t in range(responses[i])]
    return RowwiseContext(SharedPrompt(prompts, responses, prompt_of, device), sequences, rows)
