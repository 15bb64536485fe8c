"""Rollout of models that only transformers' own attention serves: sequences of one length are one dense batch.

Their keys and values lie in the engine's pages as those of any model do, so groups share prompts, and samples pause and
go on. A pass gathers them for transformers' own code, which asks for them through its cache. Batches hold sequences of
one length alone, so there is no padding and nothing that a model could count wrong. It is right before it is fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from tidemill.errors import ModelError
from tidemill.models import logits
from tidemill.models.attention.registry import Context
from tidemill.models.calling import parameters_of
from tidemill.models.modes import at_rest
from tidemill.models.parts import decoder_of
from tidemill.models.vision.eyes.eyes import Seen
from tidemill.rollout.native.pages.attention import Paged, unpage
from tidemill.rollout.native.pages.cache import PageStore

INDEXES = 1 << 20  # of an indexer's keys, beyond every layer's own number


@dataclass(frozen=True, slots=True)
class Alike:
    """Sequences that get as many tokens behind as many."""

    rows: Tensor  # (sequences, tokens) of the pass
    before: int
    pages: Tensor  # (sequences, pages)


class PagedCache(Cache):
    """transformers' cache over the engine's pages, for one batch."""

    def __init__(self, store: PageStore, alike: Alike, page: Tensor, offset: Tensor) -> None:
        super().__init__(layers=_Layers(self))
        self.store, self.alike = store, alike
        flat = alike.rows.flatten()
        self.page, self.offset = page[flat], offset[flat]

    def join(self, number: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(sequences, heads, tokens, dim) → the same behind what came before, and written down."""
        if k.ndim != 4 or v.ndim != 4:
            raise ModelError(f"keys of shape {tuple(k.shape)} are of an unknown form", "see docs/models.md")
        tokens = k.shape[0] * k.shape[2]
        given = [x.transpose(1, 2).reshape(tokens, x.shape[1], x.shape[3]) for x in (k, v)]
        self.store.write(number, given[0], given[1], self.page, self.offset)
        if not self.alike.before:
            return k, v
        count, total, pages = len(k), self.alike.before + k.shape[2], self.alike.pages.flatten()
        values = self.store.read_values(number, pages, v.dtype)
        keys = self.store.read_keys(number, pages, k.dtype).transpose(2, 3)
        return unpage(keys, count, total), unpage(values, count, total)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return self.join(layer_idx, key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """(sequences, tokens, dim)"""
        keys = indexer_key_states.unsqueeze(1)
        return self.join(INDEXES + layer_idx, keys, keys[..., :1])[0].squeeze(1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.alike.before

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.alike.before

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.alike.before + query_length, 0


class _Layers(list[Any]):
    """A layer of each number that is asked for, all of the same length."""

    def __init__(self, cache: PagedCache) -> None:
        super().__init__([_Layer(cache)])

    def __getitem__(self, number: Any) -> Any:
        return super().__getitem__(0)


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    def __init__(self, cache: PagedCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache = cache

    def get_seq_length(self) -> int:
        return self.cache.alike.before


class DenseRunner:
    def __init__(self, model: Any) -> None:
        self.model, self.decoder = model, decoder_of(model)
        self.named, self.takes_more = parameters_of(self.decoder)
        self.word = "cache_params" if "cache_params" in self.named else "past_key_values"
        if self.word not in self.named:
            raise ModelError(
                f"{type(self.decoder).__name__} takes no cache, so every token would read the whole text again",
                "such a model can be learned, but not rolled out by the native engine",
            )

    def forward(
        self, ids: Tensor, positions: Tensor, context: Context, keep: Tensor | None, seen: Seen | None = None
    ) -> Tensor:
        assert isinstance(context, Paged)
        with at_rest(self.model.modules()) if self.decoder.training else nullcontext():
            found, order = [], []
            for alike in _batches(context):
                found.append(self._decoded(ids[alike.rows], alike, context).flatten(0, 1))
                order.append(alike.rows.flatten())
        hidden = torch.cat(found).index_select(0, torch.argsort(torch.cat(order)))
        return logits.of(self.model, hidden if keep is None else hidden.index_select(0, keep))

    def _decoded(self, ids: Tensor, alike: Alike, context: Paged) -> Tensor:
        given: dict[str, Any] = {"input_ids": ids, "use_cache": True}
        given[self.word] = PagedCache(context.store, alike, context.page, context.offset)
        if "position_ids" in self.named:
            given["position_ids"] = torch.arange(alike.before, alike.before + ids.shape[1], device=ids.device)[None]
        out: Tensor = self.decoder(**given).last_hidden_state
        return out


def _batches(context: Paged) -> Iterator[Alike]:
    """Rows that get one token by how many they have, then chunks of prompts of one shape."""
    rows, device, size = context.rows, context.page.device, context.store.page_size
    for length in np.unique(rows.length):
        own = np.flatnonzero(rows.length == length)
        pages = rows.table[rows.slot[own], : -(-int(length) // size)]
        yield Alike(torch.from_numpy(own).to(device)[:, None], int(length) - 1, torch.from_numpy(pages).to(device))
    shapes: dict[tuple[int, int], list[Any]] = {}
    for chunk in context.chunks:
        shapes.setdefault((chunk.last - chunk.first, chunk.context), []).append(chunk)
    for (_, before), chunks in shapes.items():
        at = torch.stack([torch.arange(chunk.first, chunk.last, device=device) for chunk in chunks])
        yield Alike(at, before, torch.stack([chunk.pages for chunk in chunks]))
