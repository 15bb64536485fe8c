"""Operators of torch_npu's own, computed on the host as Ascend/op-plugin documents them (docs/zh/custom_APIs).

`schemas.txt` has them as the wheel's npu_native_functions_by_codegen.yaml does; a test compares the two. What a
documentation page forbids is an error here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _fake_npu as native
import torch
import torch.nn.functional as F
from torch import Tensor

TRIANGLE = 2048  # the side of the one mask that sparse modes 2 to 4 take
MOST_SEQUENCES = 1024  # of npu_fusion_attention in layout TND
LIBRARY = torch.library.Library("npu", "DEF")


def define() -> None:
    names = []
    for schema in Path(__file__).with_name("schemas.txt").read_text().splitlines():
        LIBRARY.define(schema)
        names.append(schema.partition("(")[0])
    for name in names:
        LIBRARY.impl(name, globals()[name], "CPU")
    native.implement("npu", names)
    for name, (backward, keep) in DERIVATIVES.items():
        torch.library.register_autograd(f"npu::{name}", backward, setup_context=keep, lib=LIBRARY)


def needs(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"the operator's documentation forbids this: {what}")


# -- between the products ---------------------------------------------------------------------------------------------


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    needs(gamma.dtype in (x.dtype, torch.float32), "gamma of x's dtype, or float32")
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * scale * gamma.float()).to(x.dtype), scale


def npu_rms_norm_backward(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    dy, normed = dy.float(), x.float() * rstd
    inner = dy * gamma.float()
    dx = (inner - normed * (inner * normed).mean(-1, keepdim=True)) * rstd
    dgamma = (dy * normed).reshape(-1, gamma.shape[-1]).sum(0)
    return dx.to(x.dtype), dgamma


def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    needs(x.is_contiguous() and x.shape[dim] % 2 == 0 and x.numel() > 0, "a contiguous tensor with two halves")
    a, b = x.float().chunk(2, dim)
    return (F.silu(a) * b).to(x.dtype)


def npu_swiglu_backward(grad: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    a, b = x.float().chunk(2, dim)
    share = a.sigmoid()
    da = grad.float() * b * share * (1 + a * (1 - share))
    return torch.cat([da, grad.float() * a * share], dim).to(x.dtype)


def _turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def npu_rotary_mul(
    x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    needs(rotary_mode == "half" and rotate is None, "what is simulated")
    needs(x.ndim in (3, 4) and r1.ndim == x.ndim == r2.ndim and r1.shape == r2.shape, "3 or 4 dimensions, alike")
    needs(
        x.shape[-1] % 2 == 0 and r1.shape[-1] == x.shape[-1] and x.dtype == r1.dtype == r2.dtype, "one dim, one dtype"
    )
    wide = x.float()
    return (wide * r1.float() + _turned(wide) * r2.float()).to(x.dtype)


def npu_rotary_mul_backward(
    grad: Tensor, x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    wide = grad.float()
    dx = wide * r1.float() - _turned(wide * r2.float())
    return dx.to(x.dtype), torch.zeros_like(r1), torch.zeros_like(r2)


# -- attention --------------------------------------------------------------------------------------------------------


def _weights(q: Tensor, k: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """q (queries, heads, dim), k (keys, heads, dim), allowed (queries, keys) → (heads, queries, keys)."""
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    return scores.masked_fill(~allowed, float("-inf")).softmax(-1)


def _wide(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)


def _spans(how: dict[str, Any], total: tuple[int, int]) -> Any:
    """(queries, keys, allowed) of each sequence."""
    mask, mode = how["atten_mask"], how["sparse_mode"]
    needs(mode in (3, 4), "what is simulated")
    needs(
        mask is not None and mask.dtype in (torch.bool, torch.uint8) and mask.shape == (TRIANGLE,) * 2, "one triangle"
    )
    needs(torch.equal(mask.bool(), torch.ones(TRIANGLE, TRIANGLE, dtype=torch.bool).triu(1)), "an upper triangle")
    q_ends, k_ends = how["actual_seq_qlen"], how["actual_seq_kvlen"]
    needs(len(q_ends) == len(k_ends) <= MOST_SEQUENCES, f"at most {MOST_SEQUENCES} sequences")
    needs((q_ends[-1], k_ends[-1]) == total, "ends that reach the last token")
    q_start = k_start = 0
    for q_end, k_end in zip(q_ends, k_ends):
        at = torch.arange(q_end - q_start)[:, None] + (k_end - k_start) - (q_end - q_start)
        key = torch.arange(k_end - k_start)[None, :]
        allowed = key <= at
        if mode == 4:
            allowed &= (key <= at + how["next_tockens"]) & (key >= at - how["pre_tockens"])
        yield slice(q_start, q_end), slice(k_start, k_end), allowed
        q_start, k_start = q_end, k_end


def npu_fusion_attention(
    q: Tensor, k: Tensor, v: Tensor, head_num: int, input_layout: str, pse: Any = None, padding_mask: Any = None,
    atten_mask: Any = None, scale: float = 1.0, keep_prob: float = 1.0, pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647, inner_precise: int = 0, prefix: Any = None, actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None, sparse_mode: int = 0, gen_mask_parallel: bool = True, sync: bool = False,
    softmax_layout: str = "", sink: Any = None, dropout_mask: Any = None, seed: int = 0, offset: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    needs(input_layout == "TND" and head_num == q.shape[1] and keep_prob == 1.0, "what is simulated")
    needs(q.dtype == k.dtype == v.dtype and k.shape == v.shape, "one dtype, keys and values of one shape")
    needs(q.is_contiguous() and k.is_contiguous() and v.is_contiguous(), "contiguous tensors")
    out, heads = torch.zeros_like(q), q.shape[1]
    how = {"atten_mask": atten_mask, "sparse_mode": sparse_mode, "actual_seq_qlen": actual_seq_qlen}
    how |= {"actual_seq_kvlen": actual_seq_kvlen, "next_tockens": next_tockens, "pre_tockens": pre_tockens}
    for queries, keys, allowed in _spans(how, (len(q), len(k))):
        weights = _weights(q[queries], _wide(k[keys], heads), allowed, scale)
        out[queries] = torch.einsum("hqk,khd->qhd", weights, _wide(v[keys], heads).float()).to(q.dtype)
    rest = torch.zeros(len(q), heads, 8)
    return out, rest, rest.clone(), torch.empty(0), 0, 0, 0


def npu_fusion_attention_grad(
    q: Tensor, k: Tensor, v: Tensor, dy: Tensor, head_num: int, input_layout: str, *, scale_value: float = 1.0,
    **how: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    for queries, keys, allowed in _spans(how, (len(q), len(k))):
        wide_k, wide_v, g = _wide(k[keys], heads).float(), _wide(v[keys], heads).float(), dy[queries].float()
        weights = _weights(q[queries], wide_k, allowed, scale_value)
        dweights = torch.einsum("qhd,khd->hqk", g, wide_v)
        dscores = weights * (dweights - (dweights * weights).sum(-1, keepdim=True)) * scale_value
        dq[queries] = torch.einsum("hqk,khd->qhd", dscores, wide_k)
        for into, made in (
            (dk, torch.einsum("hqk,qhd->khd", dscores, q[queries].float())),
            (dv, torch.einsum("hqk,qhd->khd", weights, g)),
        ):
            into[keys] = made.unflatten(1, (-1, group)).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), torch.empty(0), torch.empty(0)


def npu_fused_infer_attention_score(
    q: Tensor, k: Tensor, v: Tensor, *, actual_seq_lengths_kv: Sequence[int], block_table: Tensor, block_size: int = 0,
    num_heads: int = 1, num_key_value_heads: int = 0, scale: float = 1.0, input_layout: str = "BSH", **rest: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One query a sequence over pages, layout BSH."""
    lengths, table, size = actual_seq_lengths_kv, block_table, block_size
    heads, kv_heads = num_heads, num_key_value_heads or num_heads
    needs(input_layout == "BSH" and q.ndim == 3 and q.shape[1] == 1 and not rest, "what is simulated")
    needs(table is not None and table.dtype == torch.int32 and table.ndim == 2, "a table of int32 pages")
    needs(q.is_contiguous() and k.is_contiguous() and v.is_contiguous(), "contiguous tensors")
    needs(len(lengths) == len(q) == len(table) and size % 16 == 0 and 0 < size <= 512, "a length for each row")
    needs(heads % kv_heads == 0 and heads // kv_heads <= 64 and k.shape[1] == size, "heads in groups of up to 64")
    out = torch.empty_like(q)
    for row, length in enumerate(int(n) for n in lengths):
        held = table[row, : -(-length // size)].long()
        keys, values = (x[held].flatten(0, 1)[:length].unflatten(1, (kv_heads, -1)) for x in (k, v))
        query = q[row].unflatten(1, (heads, -1))
        allowed = torch.ones(1, length, dtype=torch.bool)
        weights = _weights(query, _wide(keys, heads), allowed, scale)
        out[row] = torch.einsum("hqk,khd->qhd", weights, _wide(values, heads).float()).flatten(1).to(q.dtype)
    return out, torch.zeros(1)


# -- mixtures ---------------------------------------------------------------------------------------------------------


def _groups(group_list: Tensor, kind: int, total: int) -> list[slice]:
    needs(group_list.dtype == torch.int64 and group_list.ndim == 1 and kind in (0, 1), "a list of int64")
    ends = group_list.tolist() if kind == 0 else group_list.cumsum(0).tolist()
    needs(ends == sorted(ends) and ends[-1] == total, "groups that end at the last row")
    return [slice(a, b) for a, b in zip([0, *ends[:-1]], ends)]


def npu_grouped_matmul(
    x: Sequence[Tensor], weight: Sequence[Tensor], *, group_list: Tensor, split_item: int = 0, group_type: int = -1,
    group_list_type: int = 0, **rest: Any,
) -> list[Tensor]:  # fmt: skip
    needs(len(x) == len(weight) == 1 and split_item in (2, 3) and not rest, "what is simulated")
    a, b, kind = x[0], weight[0], group_type
    needs(a.dtype == b.dtype and a.ndim == 2 and max(a.shape[-1], b.shape[-1]) < 65536, "one dtype, inner below 65536")
    if kind == 0:
        needs(b.ndim == 3 and a.is_contiguous(), "weights (groups, in, out); rows that are not transposed")
        out = a.new_empty(len(a), b.shape[2])
        for rows, w in zip(_groups(group_list, group_list_type, len(a)), b, strict=True):
            out[rows] = a[rows] @ w
        return [out]
    needs(
        kind == 2 and b.ndim == 2 and a.t().is_contiguous() and a.shape[1] == len(b), "rows transposed, over the rows"
    )
    spans = _groups(group_list, group_list_type, len(b))
    return [torch.stack([a[:, rows] @ b[rows] for rows in spans])]


def npu_moe_gating_top_k_softmax(x: Tensor, finished: Any = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    needs(finished is None and 0 < k <= min(1024, x.shape[-1]), "k of at most the experts")
    y, chosen = x.softmax(-1).topk(k, -1)
    rows = torch.arange(chosen.numel(), dtype=torch.int32).view(k, -1).t()
    return y, chosen.int(), rows.contiguous()


def npu_moe_init_routing_v2(
    x: Tensor, expert_idx: Tensor, *, active_num: int = -1, expert_num: int = -1, expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False, quant_mode: int = -1, active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0, **rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    needs(expert_idx.dtype == torch.int32 and quant_mode == -1 and row_idx_type == 0 and not rest, "what is simulated")
    needs(expert_tokens_num_flag and list(active_expert_range) == [0, expert_num], "what is simulated")
    (tokens, k), flat = expert_idx.shape, expert_idx.flatten()
    needs(active_num == tokens * k, "all tokens active")
    order = torch.argsort(flat, stable=True)
    place = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))
    counts = torch.bincount(flat, minlength=expert_num)
    tokens_of = counts if expert_tokens_num_type == 1 else counts.cumsum(0)
    return x[order // k], place.int(), tokens_of, torch.zeros(1)


def npu_moe_token_unpermute(
    permuted: Tensor, sorted_indices: Tensor, probs: Tensor | None = None, padded_mode: bool = False,
    restore_shape: Any = None,
) -> Tensor:  # fmt: skip
    needs(not padded_mode and probs is not None and sorted_indices.dtype == torch.int32, "what is simulated")
    tokens, k = probs.shape
    rows = permuted[sorted_indices.long()].view(tokens, k, -1).float()
    return (rows * probs.float().unsqueeze(-1)).sum(1).to(permuted.dtype)


# -- formats ----------------------------------------------------------------------------------------------------------


def npu_format_cast(x: Tensor, acl_format: int, *, customize_dtype: Any = None, input_dtype: Any = None) -> Tensor:
    raise RuntimeError("private formats are simulated by `torch_npu.npu_format_cast`")


def get_npu_format(x: Tensor) -> int:
    raise RuntimeError("private formats are simulated by `torch_npu.get_npu_format`")


# -- derivatives ------------------------------------------------------------------------------------------------------


def _keep(*places: int) -> Callable[..., None]:
    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        made = output if isinstance(output, tuple) else (output,)
        ctx.save_for_backward(*[inputs[i] if i >= 0 else made[-i - 1] for i in places])
        ctx.given = inputs

    return keep


def _rms_norm_back(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
    x, gamma, rstd = ctx.saved_tensors
    dx, dgamma = torch.ops.npu.npu_rms_norm_backward(dy, x, gamma, rstd)
    return dx, dgamma.to(gamma.dtype), None


def _swiglu_back(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.npu.npu_swiglu_backward(grad.contiguous(), *ctx.saved_tensors, ctx.given[1]), None


def _rotary_back(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.npu.npu_rotary_mul_backward(grad, *ctx.saved_tensors)[0], None, None, None, None


def _attention_back(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    given = ctx.given
    names = ("atten_mask", "pre_tockens", "next_tockens", "actual_seq_qlen", "actual_seq_kvlen", "sparse_mode")
    how = dict(zip(names, (given[i] for i in (7, 10, 11, 14, 15, 16))))
    found = torch.ops.npu.npu_fusion_attention_grad(
        *ctx.saved_tensors, dy.contiguous(), given[3], given[4], scale_value=given[8], **how
    )
    return *found[:3], *[None] * 21


DERIVATIVES = {
    "npu_rms_norm": (_rms_norm_back, _keep(0, 1, -2)),
    "npu_swiglu": (_swiglu_back, _keep(0)),
    "npu_rotary_mul": (_rotary_back, _keep(0, 1, 2)),
    "npu_fusion_attention": (_attention_back, _keep(0, 1, 2)),
}
