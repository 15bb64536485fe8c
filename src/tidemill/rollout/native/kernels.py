"""`kernels.c`, compiled once per machine by whatever C compiler is there, and called through ctypes.

A decode step of a small model on a CPU spends half its time outside matrix products; these do that half in one pass
each. Nothing needs them: without a compiler, or with TIDEMILL_KERNELS=0, torch operations do the same.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.batch import Array

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-shared", "-fPIC")
LANES = 16
# Splitting fewer rows than this over threads costs more than it saves.
ROWS_PER_THREAD = 32


_POINTERS = ("q", "k", "v", "keys", "values", "table", "slot", "length", "out", "scratch")
_NUMBERS = ("table_stride", "heads", "kv_heads", "dim", "v_dim", "page", "window")


class _Attention(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS]
        + [(name, ctypes.c_int64) for name in _NUMBERS]
        + [("scale", ctypes.c_float), ("softcap", ctypes.c_float)]
    )


def _compiler() -> str | None:
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def _machine() -> str:
    """What -march=native depends on, so that a shared home folder serves different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()


@cache
def load() -> Kernels | None:
    """The kernels, compiled if need be (about a second, once); None where that is not possible."""
    compiler = _compiler()
    if os.environ.get("TIDEMILL_KERNELS") == "0" or compiler is None:
        return None
    stamp = hashlib.sha256("\n".join([SOURCE.read_text(), *FLAGS, compiler, _machine()]).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidemill"
    library = folder / f"kernels-{stamp}.so"
    try:
        if not library.exists():
            _compile(compiler, folder, library)
        return Kernels(ctypes.CDLL(str(library)))
    except (OSError, subprocess.SubprocessError):
        return None


def _compile(compiler: str, folder: Path, library: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        made = Path(aside) / "kernels.so"
        subprocess.run([compiler, *FLAGS, "-o", made, SOURCE, "-lm"], check=True, capture_output=True, timeout=120)
        made.replace(library)


class Kernels:
    """Each method is the arithmetic its docstring names, on contiguous float32 tensors in host memory."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        library.tm_rms.argtypes = [pointer] * 3 + [number] * 3 + [real]
        library.tm_rotate.argtypes = [pointer] * 5 + [number] * 4 + [real]
        library.tm_gate.argtypes = [pointer] * 2 + [number] * 2
        library.tm_attend.argtypes = [ctypes.POINTER(_Attention), pointer, number, number]
        library.tm_draw.argtypes = [pointer] * 7 + [number] * 3
        self._library = library
        self._pool: ThreadPoolExecutor | None = None

    def rms(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension."""
        out = torch.empty_like(x)
        dim = x.shape[-1]
        self._library.tm_rms(x.data_ptr(), weight.data_ptr(), out.data_ptr(), 0, x.numel() // dim, dim, eps)
        return out

    def rotate(self, x: Tensor, norm: Tensor | None, cos: Tensor, sin: Tensor, position: Tensor, eps: float) -> None:
        """In place on x (tokens, heads, dim): norm over dim, then rotary positions from whole tables."""
        tokens, heads, dim = x.shape
        weight = None if norm is None else norm.data_ptr()
        tables = cos.data_ptr(), sin.data_ptr(), position.data_ptr()
        self._library.tm_rotate(x.data_ptr(), weight, *tables, 0, tokens, heads, dim, eps)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, in place of gate."""
        self._library.tm_gate(gate.data_ptr(), up.data_ptr(), 0, gate.numel())
        return gate

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, table: Array, slot: Array, length: Array,
        out: Tensor, scale: float, window: int | None, softcap: float | None,
    ) -> None:  # fmt: skip
        """Write one token per row to its page and attend to all its row has: `Paged` without prompts."""
        rows, heads, dim = q.shape
        kv_heads, v_dim = v.shape[1:]
        how = _Attention(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), keys.data_ptr(), values.data_ptr(), table.ctypes.data,
            slot.ctypes.data, length.ctypes.data, out.data_ptr(), 0, table.shape[1], heads, kv_heads, dim, v_dim,
            keys.shape[-1], window or 0, scale, softcap or 0.0,
        )  # fmt: skip
        wide = heads // kv_heads * (int(length.max()) + LANES)

        def run(first: int, last: int) -> None:
            scratch = torch.empty(wide)
            self._library.tm_attend(ctypes.byref(how), scratch.data_ptr(), first, last)

        self._split(run, rows)

    def draw(self, logits: Tensor, temperature: Array, uniform: Array, greedy: Array) -> tuple[Array, Array]:
        """Tokens and log-probabilities: `sampling.draw` without truncation."""
        rows, vocab = logits.shape
        tokens, logprobs = np.empty(rows, np.int64), np.empty(rows, np.float32)
        arrays = [a.ctypes.data for a in (temperature, uniform, greedy, tokens, logprobs)]

        def run(first: int, last: int) -> None:
            scratch = torch.empty(vocab)
            self._library.tm_draw(logits.data_ptr(), *arrays, scratch.data_ptr(), first, last, vocab)

        self._split(run, rows)
        return tokens, logprobs

    def _split(self, run: Any, rows: int) -> None:
        threads = torch.get_num_threads()
        parts = min(threads, rows // ROWS_PER_THREAD)
        if parts < 2:
            run(0, rows)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(threads - 1)
        edges = [rows * i // parts for i in range(parts + 1)]
        waiting = [self._pool.submit(run, a, b) for a, b in pairwise(edges[1:])]
        run(edges[0], edges[1])
        for future in waiting:
            future.result()
