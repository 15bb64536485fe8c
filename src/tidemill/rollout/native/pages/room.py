"""Where an engine keeps keys and values: pages, their bytes, and a vendor's attention over them if there is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from tidemill.rollout.native.pages import paged
from tidemill.rollout.native.pages.cache import PagePool, PageStore, TokenStore

# Small pages waste little; larger ones let an accelerator's attention read longer runs. On an H200, 512 rows of 257-768
# tokens take 84 us with pages of 32 (3.3 TB/s), 90 us with 64 and 97 us with 128.
PAGE_SIZE = 16
ACCELERATOR_PAGE_SIZE = 32
# Prompt tokens read in one step. Larger products gain nothing on a CPU; running sequences would only wait longer.
STEP_TOKENS = 2048
ACCELERATOR_STEP_TOKENS = 16384


@dataclass(frozen=True)
class Room:
    pool: PagePool
    store: PageStore
    library: paged.PagedAttention | None
    step_tokens: int


def make_room(
    model: Any,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_seqs: int,
    max_len: int,
    page_size: int | None,
    cache_tokens: int | None,
    cache_dtype: Literal["auto", "int8", "fp8"],
    batch_invariant: bool,
    walks_pages: bool,
) -> Room:
    """Make room for `cache_tokens`, or for `max_seqs` of `max_len` tokens. `walks_pages`: the engine's own kernels read
    pages, so no vendor's attention is needed."""
    is_plain = cache_dtype == "auto" and not batch_invariant
    library = paged.choose(model, device, dtype) if is_plain and not walks_pages else None
    usual, step_tokens = (
        (PAGE_SIZE, STEP_TOKENS) if device.type == "cpu" else (ACCELERATOR_PAGE_SIZE, ACCELERATOR_STEP_TOKENS)
    )
    page_size = page_size or (usual if library is None else library.page_size)
    pages = -(-cache_tokens // page_size) if cache_tokens else max_seqs * -(-max_len // page_size)
    make_store = TokenStore if batch_invariant or library is not None else PageStore
    # One page more than can be given out: captured decoding writes its padding there.
    store = make_store(pages + 1, page_size, device, None if cache_dtype == "auto" else cache_dtype)
    return Room(PagePool(pages, page_size), store, library, step_tokens)
