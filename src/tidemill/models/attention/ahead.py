"""Attention of rows in which the tokens of an image see all of it, those behind them too.

Around any context: what it gives for these tokens, which saw only what lies before them, is computed again with all
that they see. Tokens behind an image see it either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidemill.models.attention.packed import attention, first_seen
from tidemill.models.attention.registry import AttentionForm, Context
from tidemill.models.upload import upload

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of one image in a packed row, and all that they see: indices into the row."""

    queries: Ints
    keys: Ints


@dataclass(frozen=True, slots=True)
class Runs:
    """Some of one shape."""

    queries: Tensor  # (runs, queries)
    keys: Tensor  # (runs, keys), in the order of their sequence; a run's own tokens are the last


class SeesAhead:
    """`windows`: in layers with a window alone."""

    def __init__(self, inner: Context, runs: Sequence[Run], windows: bool, device: torch.device) -> None:
        self.inner, self.windows = inner, windows
        shapes: dict[tuple[int, int], list[Run]] = {}
        for run in runs:
            shapes.setdefault((len(run.queries), len(run.keys)), []).append(run)
        self.runs = [
            Runs(*(upload(np.stack([getattr(run, name) for run in alike]), device) for name in ("queries", "keys")))
            for alike in shapes.values()
        ]

    def recur(self, call: Any) -> Any:
        return self.inner.recur(call)  # type: ignore[attr-defined]

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
        out = self.inner.attend(layer, q, k, v, form)
        if self.windows and form.window is None:
            return out
        for runs in self.runs:
            count, own = runs.queries.shape
            seen = runs.keys.shape[1]
            some_q = q[runs.queries].transpose(1, 2)
            some_k, some_v = (x[runs.keys].transpose(1, 2) for x in (k, v))
            at, before = torch.arange(seen - own, seen, device=q.device), torch.arange(seen, device=q.device)
            mask = before >= first_seen(at[:, None], form)
            made = attention(some_q, some_k, some_v, mask, form).transpose(1, 2).reshape(count * own, *out.shape[1:])
            out = out.index_copy(0, runs.queries.reshape(-1), made.to(out.dtype))
        return out
