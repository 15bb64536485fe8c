"""Packed attention through Ascend's fused operator, in its layout of tokens one after another (TND).

The operator takes where each sequence ends, for queries and for keys, and one upper triangle as the mask of them all:
mode 3 lines queries and keys up at their ends, mode 4 lets a query see so many keys before it. Its arguments are held
by a test with a stand-in; the operator itself has not been run by this project.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tidemill.device import vendor
from tidemill.errors import ModelError
from tidemill.models.attention.registry import AttentionForm
from tidemill.models.attention.varlen import Spans

TRIANGLE = 2048  # the mask's side that modes 2 to 4 ask for, whatever the lengths
CAUSAL, BAND = 3, 4
EVERYTHING = 2**31 - 1


def works_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the vendor's package brought the operator for this device, and the operator takes this dtype."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    return vendor.implements(device.type, f"{device.type}::npu_fusion_attention")


def causal(q: Tensor, k: Tensor, v: Tensor, queries: Spans, keys: Spans, form: AttentionForm) -> Tensor:
    """q (tokens, heads, dim), k and v (keys, kv_heads, dim); the last query of a sequence sees its last key."""
    if form.sinks is not None:
        raise ModelError("Ascend's fused attention knows no attention sinks", "set learn.attention=blocks")
    found = vendor.operators(q.device).npu_fusion_attention(
        q, k, v, q.shape[1], "TND",
        atten_mask=_triangle(q.device), scale=form.scale, keep_prob=1.0,
        pre_tockens=EVERYTHING if form.window is None else form.window - 1, next_tockens=0,
        sparse_mode=CAUSAL if form.window is None else BAND,
        actual_seq_qlen=list(queries.host), actual_seq_kvlen=list(keys.host),
    )  # fmt: skip
    out: Tensor = found[0]
    return out


@functools.cache
def _triangle(device: torch.device) -> Tensor:
    """True where nothing may be seen."""
    return torch.ones(TRIANGLE, TRIANGLE, dtype=torch.bool, device=device).triu_(1)
