"""The state of each head along the chunks of sequences: the one part of the rule that cannot be done for all chunks at
once. Forward and backward are the same recurrence, in two directions:

    D_n = Y_n + L_n X_n        X_{n+1} = γ_n X_n + R_nᵀ D_n + E_n

Forward X is the state S, Y = U, L = -W, R = K̂ and E = 0, and D are the chunk's changes Δ. Backward X is its gradient,
Y = dΔ, L = K̂, R = -W and E = the gradient of the states at chunks' starts.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from tidemill.models.recurrent.chunked.on_device import kernels


def scanned(
    w: Tensor, u: Tensor, k: Tensor, decay: Tensor, begins: Tensor, ends_at: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """w and k (chunks, heads, CHUNK, dk), u (…, dv), decay (chunks, heads) float32, begins (sequences, heads, dk, dv)
    float32; `ends_at` as `Phase.ends`. Gives the states at chunks' starts (chunks, heads, dk, dv), the changes
    (chunks, heads, CHUNK, dv), both in the dtype of u, and the last states, float32."""
    found: tuple[Tensor, Tensor, Tensor] = _scan(w, u, k, decay, begins, ends_at)
    return found


@torch.library.custom_op("tidemill::delta_scan", mutates_args=())
def _scan(
    w: Tensor, u: Tensor, k: Tensor, decay: Tensor, begins: Tensor, ends_at: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _recur(u, -w, k, decay, begins, ends_at, None)


@_scan.register_fake
def _(w: Tensor, u: Tensor, k: Tensor, decay: Tensor, begins: Tensor, ends_at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    states = u.new_empty(*u.shape[:2], w.shape[-1], u.shape[-1])
    return states, torch.empty_like(u), torch.empty_like(begins)


@torch.library.custom_op("tidemill::delta_scan_backward", mutates_args=())
def _scan_backward(
    grad_states: Tensor, grad_changes: Tensor, grad_ends: Tensor, w: Tensor, k: Tensor, decay: Tensor,
    states: Tensor, changes: Tensor, ends_at: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    after, grad_u, grad_begins = _recur(grad_changes, k, -w, decay, grad_ends, ends_at, grad_states)
    grad_w = -(grad_u @ states.transpose(-1, -2))
    grad_k = changes @ after.transpose(-1, -2)
    grad_decay = (after.float() * states.float()).sum((-1, -2))
    return grad_w, grad_u, grad_k, grad_decay, grad_begins


@_scan_backward.register_fake
def _(
    grad_states: Tensor, grad_changes: Tensor, grad_ends: Tensor, w: Tensor, k: Tensor, decay: Tensor,
    states: Tensor, changes: Tensor, ends_at: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    like = torch.empty_like
    return like(w), like(changes), like(k), like(decay), like(grad_ends)


def _setup(ctx: object, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    w, _, k, decay, _, ends_at = inputs
    ctx.save_for_backward(w, k, decay, output[0], output[1], ends_at)  # type: ignore[attr-defined]


def _backward(ctx: object, *grads: Tensor) -> tuple[Tensor | None, ...]:
    w, k, decay, states, changes, ends_at = ctx.saved_tensors  # type: ignore[attr-defined]
    given = [grad.contiguous() for grad in grads]
    found = _scan_backward(*given, w, k, decay, states, changes, ends_at)
    return *found, None


_scan.register_autograd(_backward, setup_context=_setup)


def _recur(
    y: Tensor, left: Tensor, right: Tensor, decay: Tensor, begins: Tensor, ends_at: Tensor, added: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """X before each chunk, D of each, and the last X. With `added` (the backward direction) from each sequence's last
    chunk to its first; what is `added` of a chunk comes after it."""
    if (fast := kernels(y.device.type)) is not None and fast.fits(left.shape[-1], y.shape[-1]):
        return fast.recur(y, left, right, decay, begins, ends_at, added)  # type: ignore[no-any-return]
    before, made, x = torch.empty_like(_states(y, left)), torch.empty_like(y), begins.clone()
    runs = list(pairwise(ends_at.tolist()))
    for step in range(max((b - a for a, b in runs), default=0)):
        own = [i for i, (a, b) in enumerate(runs) if b - a > step]
        at = [runs[i][0] + step if added is None else runs[i][1] - 1 - step for i in own]
        now = x[own]
        before[at] = now.to(before.dtype)
        change = y[at].float() + left[at].float() @ now
        made[at] = change.to(made.dtype)
        after = decay[at][..., None, None] * now + right[at].float().transpose(-1, -2) @ change
        x[own] = after if added is None else after + added[at].float()
    return before, made, x


def _states(y: Tensor, left: Tensor) -> Tensor:
    return y.new_empty(*y.shape[:2], left.shape[-1], y.shape[-1])
