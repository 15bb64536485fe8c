"""The batch-invariant mode of the native engine: the module itself under `models.layers.rowwise`, and a cache whose
tokens lie one after another. The learner in the same mode gets the same bits:
`tests/rollout/test_batch_invariant.py` checks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from tidemill.errors import ConfigError
from tidemill.models.attention.registry import AttentionForm, Context, is_dense
from tidemill.models.layers import rowwise
from tidemill.models.recurrent import mixers
from tidemill.models.vision.eyes.eyes import Seen
from tidemill.rollout.native.draw.sampling import Draw, Drawn, draw
from tidemill.rollout.native.forward.runner import PlainRunner
from tidemill.rollout.native.pages.attention import DecodeRows, PageChunk
from tidemill.rollout.native.pages.cache import TokenStore


class RowwiseRunner(PlainRunner):
    def forward(
        self, ids: Tensor, positions: Tensor, context: Context, keep: Tensor | None, seen: Seen | None = None
    ) -> Tensor:
        with rowwise.mode(True, ids.device):
            return super().forward(ids, positions, context, keep, seen)


def rowwise_runner(model: Any) -> RowwiseRunner:
    if is_dense(model) or mixers.has_some(model):
        name = type(model).__name__
        raise ConfigError(f"rollout.batch_invariant: {name} has layers that it is not known for", "set it to false")
    return RowwiseRunner(model)


@dataclass(slots=True)
class RowwisePaged:
    """Implements `attention.Context`: every token of the pass is a row with its own length, prompt or not."""

    store: TokenStore
    page: Tensor
    offset: Tensor
    table: np.ndarray
    which: np.ndarray
    length: np.ndarray
    calls: int = 0  # of `attend` so far

    @classmethod
    def of(
        cls, store: TokenStore, page: Tensor, offset: Tensor, rows: DecodeRows, chunks: Sequence[PageChunk]
    ) -> RowwisePaged:
        table = np.zeros((rows.count + len(chunks), rows.table.shape[1]), np.int64)
        table[: rows.count] = rows.table[rows.slot]
        which, length = [np.arange(rows.count)], [rows.length]
        for i, chunk in enumerate(chunks, rows.count):
            table[i, : len(chunk.pages)] = chunk.pages.numpy()
            count = chunk.last - chunk.first
            which.append(np.full(count, i))
            length.append(chunk.context + 1 + np.arange(count))
        return cls(store, page, offset, table, np.concatenate(which), np.concatenate(length))

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
        layer = self.calls if layer is None else layer
        self.calls = layer + 1
        self.store.write(layer, k, v, self.page, self.offset)
        keys, values = self.store.keys[layer].flatten(0, 1), self.store.values[layer].flatten(0, 1)
        return rowwise.attention(q, keys, values, self.table, self.which, self.length, self.store.page_size, form)


def draw_rowwise(logits: Tensor, how: Draw) -> Drawn:
    """`sampling.draw`, with log-probabilities computed as the learner computes them."""
    drawn = draw(logits, how)
    heated = logits if how.temperature is None else logits / how.temperature.unsqueeze(1)
    chosen = heated.gather(1, drawn.tokens.unsqueeze(1)).squeeze(1)
    return Drawn(drawn.tokens, chosen - rowwise.logsumexp(heated), drawn.kept, drawn.tops)
