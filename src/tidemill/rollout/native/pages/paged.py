"""Which attention decodes over pages on which device: the one registry for rollout.

| kind | what it is | where |
|---|---|---|
| torch | pages walked by torch operations: the plain reference (`attention.Paged`) | everywhere |
| compiled | `kernels.c` | float32 on a CPU with a C compiler |
| triton | `triton_kernels.py`, inside captured decoding | accelerators that Triton compiles for, lean models |
| varlen | torch's own `varlen_attn` with a block table (torch ≥ 2.13) | 16-bit models that are not decoded as graphs |
| fused_infer | the vendor's fused inference attention over pages | Ascend NPUs, 16-bit |
| gathered | copies of pages and torch operations (`gathered.py`) | devices that cannot walk pages in place |

The first three are chosen by the engine, with the pass they belong to. Those of `KINDS` are functions over whole pages
of tokens (pages, page_size, kv_heads, dim), one query per sequence; what they do not take is gathered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tidemill.device import vendor
from tidemill.models.attention.registry import AttentionForm
from tidemill.rollout.native.pages import gathered
from tidemill.rollout.native.pages.cache import PageStore

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Queries:
    """One query per sequence: what each sees of the pages."""

    table: Tensor  # (rows, pages) int32
    length: Tensor  # (rows,) int32, tokens seen
    host: Sequence[int]  # the same on the host
    scale: float
    window: int | None


Decode = Callable[[Tensor, Tensor, Tensor, Queries], Tensor]  # q (rows, heads, dim), keys, values → (rows, heads, dim)


@dataclass(frozen=True, slots=True)
class PagedAttention:
    decode: Decode
    works: Callable[[torch.device], bool]
    page_size: int
    most_dim: int  # of a head
    has_window: bool
    host_argument: str = ""  # of its operator: lengths that a captured graph must be told before each replay


def decode_varlen(q: Tensor, keys: Tensor, values: Tensor, queries: Queries) -> Tensor:
    attend: Any = _varlen_attn()
    ends = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    # The kernel counts the positions left of the query's own.
    window = (-1 if queries.window is None else queries.window - 1, 0)
    out: Tensor = attend(
        q, keys, values, ends, None, 1, max(queries.host), scale=queries.scale, window_size=window,
        enable_gqa=q.shape[1] != keys.shape[2], seqused_k=queries.length, block_table=queries.table,
    )  # fmt: skip
    return out


def _varlen_attn() -> Any:
    """torch's function where it knows block tables; None before 2.13."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "block_table" in inspect.signature(varlen_attn).parameters else None


def _has_varlen(device: torch.device) -> bool:
    if device.type == "cpu" or _varlen_attn() is None:
        return False
    key = torch._C._dispatch_key_for_device(device.type)
    has_kernel: bool = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", key)
    return has_kernel


def decode_fused_infer(q: Tensor, keys: Tensor, values: Tensor, queries: Queries) -> Tensor:
    """Layout BSH: one token per sequence and heads side by side, in queries as in pages."""
    rows, heads, dim = q.shape
    pages, size, kv_heads, _ = keys.shape
    out, _ = vendor.operators(q.device).npu_fused_infer_attention_score(
        q.reshape(rows, 1, heads * dim), keys.view(pages, size, -1), values.view(pages, size, -1),
        actual_seq_lengths_kv=list(queries.host), block_table=queries.table, block_size=size,
        num_heads=heads, num_key_value_heads=kv_heads, scale=queries.scale, input_layout="BSH",
    )  # fmt: skip
    attended: Tensor = out.view(rows, heads, dim)
    return attended


def _has_fused_infer(device: torch.device) -> bool:
    return vendor.implements(device.type, f"{device.type}::npu_fused_infer_attention_score")


def can_walk(device: torch.device) -> bool:
    """Whether the device has what joins the parts of a walk: a running maximum by row."""
    return device.type == "cpu" or vendor.implements(device.type, "aten::index_reduce.out")


def takes(library: PagedAttention | None, form: AttentionForm) -> bool:
    """Whether a library decodes this form of attention."""
    if library is None or form.softcap is not None or form.chunk is not None or form.sinks is not None:
        return False
    return library.has_window or form.window is None


def attend(
    store: PageStore, layer: int, q: Tensor, queries: Queries, form: AttentionForm, library: PagedAttention | None
) -> Tensor:
    """One query per sequence, by the library or over copies of its pages; the new keys and values are in the store."""
    if library is not None and takes(library, form):
        return library.decode(q.contiguous(), store.keys[layer], store.values[layer], queries)
    return gathered.attend(q, store, layer, queries.table, queries.length, form)


# Page sizes are what the kernels are made for: 256 is the smallest that every flash kernel takes.
KINDS: dict[str, PagedAttention] = {
    "fused_infer": PagedAttention(
        decode_fused_infer,
        _has_fused_infer,
        page_size=128,
        most_dim=512,
        has_window=False,
        host_argument="actual_seq_lengths_kv",
    ),
    "varlen": PagedAttention(decode_varlen, _has_varlen, page_size=256, most_dim=256, has_window=True),
}


def choose(model: Any, device: torch.device, dtype: torch.dtype) -> PagedAttention | None:
    """The first kind that can serve the model here; None: walk the pages."""
    settings = model.config.get_text_config()
    if dtype not in SIXTEEN_BITS or getattr(settings, "attn_logit_softcapping", None) is not None:
        return None
    dim = int(getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads)
    has_window = getattr(settings, "sliding_window", None) is not None
    is_narrow = getattr(settings, "v_head_dim", dim) != dim  # MLA: values narrower than keys
    for kind in KINDS.values():
        if kind.works(device) and dim <= kind.most_dim and not is_narrow and (kind.has_window or not has_window):
            return kind
    return None
