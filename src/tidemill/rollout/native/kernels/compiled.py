"""`kernels.c`, compiled once per machine by whatever C compiler is there, and called through ctypes.

A decode step of a small model on a CPU spends half its time outside matrix products; these do that half in one pass
each. Nothing needs them: without a compiler, or with TIDEMILL_KERNELS=0, torch operations do the same.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tidemill.batch import Array
from tidemill.device.compiled import ROWS_PER_THREAD, library, threads_for
from tidemill.models.attention.registry import AttentionForm
from tidemill.rollout.native.pages.cache import PageStore

SOURCE = Path(__file__).with_name("kernels.c")
LANES = 16

_POINTERS = (
    "q", "k", "v", "keys", "values", "key_scale", "value_scale", "table", "slot", "length", "sinks", "out", "scratch",
)  # fmt: skip
_NUMBERS = ("table_stride", "heads", "kv_heads", "dim", "v_dim", "page", "window", "chunk")


class _Attention(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS]
        + [(name, ctypes.c_int64) for name in _NUMBERS]
        + [("scale", ctypes.c_float), ("softcap", ctypes.c_float)]
    )


class _Draws(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p) for name in ("logits", "temperature", "uniform", "greedy", "tokens", "logprobs")
    ] + [(name, ctypes.c_int64) for name in ("rows", "vocab")]


def kernels_for(parameter: Tensor, store: PageStore) -> Kernels | None:
    """The kernels, where they serve weights and pages like these."""
    is_host_float = parameter.device.type == "cpu" and parameter.dtype == torch.float32
    return load() if is_host_float and store.page_size % LANES == 0 and store.kind != "fp8" else None


@cache
def load() -> Kernels | None:
    """The kernels, compiled if need be (about a second, once); None where that is not possible."""
    found = library(SOURCE)
    return None if found is None else Kernels(found)


class Kernels:
    """Each method is the arithmetic its docstring names, on contiguous float32 tensors in host memory."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number, real, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
        library.tm_rms.argtypes = [pointer] * 3 + [number] * 2 + [real, threads]
        library.tm_rotate.argtypes = [pointer] * 5 + [number] * 3 + [real, threads]
        library.tm_gate.argtypes = [pointer] * 2 + [number] * 2 + [threads]
        library.tm_attend.argtypes = [ctypes.POINTER(_Attention), pointer, number, number, threads]
        library.tm_draw.argtypes = [ctypes.POINTER(_Draws), pointer, threads]
        self._library = library

    def rms(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension."""
        out = torch.empty_like(x)
        dim = x.shape[-1]
        rows = x.numel() // dim
        pointers = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        self._library.tm_rms(*pointers, rows, dim, eps, threads_for(x.numel()))
        return out

    def rotate(self, x: Tensor, norm: Tensor | None, cos: Tensor, sin: Tensor, position: Tensor, eps: float) -> None:
        """In place on x (tokens, heads, dim): norm over dim, then rotary positions from whole tables."""
        tokens, heads, dim = x.shape
        weight = None if norm is None else norm.data_ptr()
        tables = cos.data_ptr(), sin.data_ptr(), position.data_ptr()
        self._library.tm_rotate(x.data_ptr(), weight, *tables, tokens, heads, dim, eps, threads_for(x.numel()))

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, in place of gate."""
        dim = gate.shape[-1]
        rows = gate.numel() // dim
        self._library.tm_gate(gate.data_ptr(), up.data_ptr(), rows, dim, threads_for(gate.numel()))
        return gate

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, table: Array, slot: Array, length: Array,
        out: Tensor, form: AttentionForm, scales: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Write one token per row to its page and attend to all its row has: `Paged` without prompts. With `scales` of
        keys and values, these are int8."""
        rows, heads, dim = q.shape
        kv_heads, v_dim = v.shape[1:]
        sinks = None if form.sinks is None else form.sinks.detach().contiguous()
        how = _Attention(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), keys.data_ptr(), values.data_ptr(),
            *((None, None) if scales is None else (scales[0].data_ptr(), scales[1].data_ptr())), table.ctypes.data,
            slot.ctypes.data, length.ctypes.data, None if sinks is None else sinks.data_ptr(), out.data_ptr(), 0,
            table.shape[1], heads, kv_heads, dim, v_dim, keys.shape[-1], form.window or 0, form.chunk or 0, form.scale,
            form.softcap or 0.0,
        )  # fmt: skip
        wide, threads = heads // kv_heads * (int(length.max()) + LANES), threads_for(rows, ROWS_PER_THREAD)
        scratch = torch.empty(threads * wide)
        self._library.tm_attend(ctypes.byref(how), scratch.data_ptr(), wide, rows, threads)

    def draw(self, logits: Tensor, temperature: Array, uniform: Array, greedy: Array) -> tuple[Array, Array]:
        """Tokens and log-probabilities: `sampling.draw` without truncation."""
        rows, vocab = logits.shape
        tokens, logprobs = np.empty(rows, np.int64), np.empty(rows, np.float32)
        arrays = [a.ctypes.data for a in (temperature, uniform, greedy, tokens, logprobs)]
        how, threads = _Draws(logits.data_ptr(), *arrays, rows, vocab), threads_for(logits.numel())
        scratch = torch.empty(threads * vocab)
        self._library.tm_draw(ctypes.byref(how), scratch.data_ptr(), threads)
        return tokens, logprobs
