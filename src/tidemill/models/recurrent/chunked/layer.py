"""A gated delta net over packed rows, and of one token of each of many sequences: what the module computes, from
its own parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.models.recurrent.chunked.conv import convolved
from tidemill.models.recurrent.chunked.on_device import kernels
from tidemill.models.recurrent.chunked.plan import RowPlan
from tidemill.models.recurrent.chunked.rule import gated_delta
from tidemill.models.recurrent.states import CONV, RECURRENT, Key, State

# Their layers are the same but for the order in which two of them project.
KINDS = frozenset({"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"})
EPS = 1e-6  # under the root of the norms of queries and keys
CONV_STATE, DELTA_STATE = (CONV, 0), (RECURRENT, 0)


def is_known(module: Any) -> bool:
    return type(module).__name__ in KINDS and module.activation == "silu" and module.conv1d.bias is None


def states_of(module: Any) -> dict[Key, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of one sequence's states."""
    channels, _, width = module.conv1d.weight.shape
    delta = module.num_v_heads, module.head_k_dim, module.head_v_dim
    return {CONV_STATE: ((channels, width), module.conv1d.weight.dtype), DELTA_STATE: (delta, torch.float32)}


@dataclass(frozen=True, slots=True)
class Projected:
    """Of tokens: queries, keys and values side by side, before the convolution; the gate of the output; and what the
    decay and the weight of a change are made of."""

    qkv: Tensor  # (tokens, channels)
    z: Tensor  # (tokens, heads, dv)
    b: Tensor  # (tokens, heads)
    a: Tensor


def projected(module: Any, x: Tensor) -> Projected:
    """x (tokens, width)"""
    if hasattr(module, "in_proj_qkv"):
        z = module.in_proj_z(x).view(len(x), -1, module.head_v_dim)
        return Projected(module.in_proj_qkv(x), z, module.in_proj_b(x), module.in_proj_a(x))
    both = module.in_proj_qkvz(x)[None], module.in_proj_ba(x)[None]
    q, k, v, z, b, a = (part[0] for part in module.fix_query_key_value_ordering(*both))
    return Projected(torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], 1), z, b, a)


def forward(module: Any, x: Tensor, plan: RowPlan, given: State | None = None) -> tuple[Tensor, State]:
    """x (tokens, width) → the same, and the states after the first phase's segments. `given`: states that segments
    begin with."""
    made, weight = projected(module, x), module.conv1d.weight.squeeze(1)
    rows = made.qkv if given is None else torch.cat([_rows_of(given[CONV_STATE]).to(made.qkv), made.qkv])
    mixed = F.silu(convolved(rows, weight, None, plan.taps(weight.shape[1])))
    q, k, v = _heads(module, mixed)
    decay = -module.A_log.float().exp() * F.softplus(made.a.float() + module.dt_bias)
    out, ends = gated_delta(
        q, k, v, decay, made.b.sigmoid().float(), plan, None if given is None else given[DELTA_STATE]
    )
    out = module.norm(out.reshape(-1, module.head_v_dim), made.z.reshape(-1, module.head_v_dim)).view(len(x), -1)
    return module.out_proj(out), {CONV_STATE: _last_rows(rows, plan, weight.shape[1]), DELTA_STATE: ends}


def _heads(module: Any, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys normed, queries scaled, one for each head of values."""
    q, k, v = torch.split(mixed, [module.key_dim, module.key_dim, module.value_dim], 1)
    q, k = (_unit(part.view(len(mixed), -1, module.head_k_dim)) for part in (q, k))
    times = module.num_v_heads // module.num_k_heads
    if times > 1:
        q, k = q.repeat_interleave(times, 1), k.repeat_interleave(times, 1)
    return q * module.head_k_dim**-0.5, k, v.view(len(mixed), -1, module.head_v_dim)


def _unit(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + EPS).rsqrt()).to(x.dtype)


def _rows_of(conv: Tensor) -> Tensor:
    """(states, channels, width) → the last `width - 1` inputs of each, state after state."""
    return conv[..., 1:].transpose(1, 2).reshape(-1, conv.shape[1])


def _last_rows(rows: Tensor, plan: RowPlan, width: int) -> Tensor:
    """(segments, channels, width): the last inputs of the first phase's segments, 0 before their sequences' starts."""
    taps = plan.taps(width).source
    last = [int(plan.starts[i + 1]) - 1 for i in plan.phases[0].segments]
    index = taps[torch.tensor(last, device=taps.device)].long()  # the inputs that each last token sees
    found = rows.index_select(0, index.clamp(min=0).flatten()).view(*index.shape, -1)
    return (found * (index >= 0).unsqueeze(-1)).transpose(1, 2)


def step(module: Any, x: Tensor, conv: Tensor, delta: Tensor, slots: Tensor) -> Tensor:
    """One token of each row: x (rows, width), whose states lie at `slots` of conv (slots, channels, width) and of delta
    (slots, heads, dk, dv), and are changed there."""
    made, weight = projected(module, x), module.conv1d.weight.squeeze(1)
    if (fast := kernels(x.device.type)) is not None and fast.fits(module.head_k_dim, module.head_v_dim):
        out = fast.step(
            made.qkv, made.z, made.b, made.a, conv, delta, slots, weight, module.A_log, module.dt_bias,
            module.norm.weight, (module.num_k_heads, module.num_v_heads), module.norm.variance_epsilon,
        )  # fmt: skip
        return module.out_proj(out)  # type: ignore[no-any-return]
    index = slots.long()
    seen = torch.cat([conv[index], made.qkv.unsqueeze(-1).to(conv.dtype)], -1)[..., 1:]
    conv[index] = seen
    mixed = F.silu((seen.float() * weight.float()).sum(-1)).to(x.dtype)
    q, k, v = (part.float() for part in _heads(module, mixed))
    decay = (-module.A_log.float().exp() * F.softplus(made.a.float() + module.dt_bias)).exp()
    state = delta[index] * decay[..., None, None]
    change = (v - torch.einsum("rhkv,rhk->rhv", state, k)) * made.b.float().sigmoid().unsqueeze(-1)
    state = state + k.unsqueeze(-1) * change.unsqueeze(-2)
    delta[index] = state
    out = torch.einsum("rhkv,rhk->rhv", state, q).to(x.dtype)
    out = module.norm(out.reshape(-1, module.head_v_dim), made.z.reshape(-1, module.head_v_dim)).view(len(x), -1)
    return module.out_proj(out)  # type: ignore[no-any-return]
