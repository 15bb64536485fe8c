"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024) in chunks.

    S_t = e^{g_t} S_{t-1} + k_t δ_tᵀ      δ_t = β_t (v_t - e^{g_t} S_{t-1}ᵀ k_t)      o_t = S_tᵀ q_t

With G the sum of g inside of a chunk, all changes of a chunk follow from the state S at its start: Δ = U - W S, where
U = T (β V), W = T (β e^G K), T = (I + A)⁻¹ and A_ij = β_i e^{G_i - G_j} k_i·k_j for j < i. Then O = (e^G Q) S + P Δ
with P_ij = e^{G_i - G_j} q_i·k_j for j ≤ i, and the state after the chunk is e^{G_C} S + K̂ᵀ Δ, K̂_j = e^{G_C - G_j} k_j.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from tidemill.models.recurrent.chunked.on_device import kernels
from tidemill.models.recurrent.chunked.plan import CHUNK, RowPlan
from tidemill.models.recurrent.chunked.scan import scanned


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, plan: RowPlan, given: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q and k (tokens, heads, dk), normed and scaled, v (tokens, heads, dv), log_decay and beta (tokens, heads) and
    `given` (states, heads, dk, dv) float32. Gives (tokens, heads, dv), and the states after the first phase."""
    dtype = v.dtype
    q, k, v, log_decay, beta = (_chunked(x, plan) for x in (q, k, v, log_decay, beta))
    total = log_decay.cumsum(-1)  # G (chunks, heads, CHUNK)
    ratio = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()  # e^{G_i - G_j}, j ≤ i
    products = (k.float() @ k.float().transpose(-1, -2)) * ratio * beta.unsqueeze(-1)
    inverse = inverse_of_unit_lower(products.tril(-1)).to(dtype)
    u = inverse @ (v * beta.unsqueeze(-1).to(dtype))
    w = inverse @ (k * (beta * total.exp()).unsqueeze(-1).to(dtype))
    last = total[..., -1:]
    k_left = k * (last - total).exp().unsqueeze(-1).to(dtype)
    starts, changes, ends = _along(w, u, k_left, last.squeeze(-1).exp(), plan, given)
    seen = ((q.float() @ k.float().transpose(-1, -2)) * ratio).to(dtype)
    out = (q * total.exp().unsqueeze(-1).to(dtype)) @ starts + seen @ changes
    flat = out.transpose(1, 2).reshape(plan.chunks * CHUNK, *out.shape[1:2], out.shape[-1])
    return flat.index_select(0, plan.scatter), ends


def _chunked(x: Tensor, plan: RowPlan) -> Tensor:
    """(tokens, heads, …) → (chunks, heads, CHUNK, …), zeros where there is no token: these change no state."""
    padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return padded.index_select(0, plan.gather).view(plan.chunks, CHUNK, *x.shape[1:]).transpose(1, 2).contiguous()


def _along(
    w: Tensor, u: Tensor, k: Tensor, decay: Tensor, plan: RowPlan, given: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """States at chunks' starts and changes of all chunks, phase after phase; states after the first one's segments."""
    starts, changes, ends = [], [], None
    for phase in plan.phases:
        own = slice(phase.first, phase.first + sum(phase.counts))
        if phase.parents is not None:
            assert ends is not None
            begins = ends.index_select(0, phase.parents)
        elif phase.givens is not None and given is not None:
            begins = given.index_select(0, phase.givens.clamp(min=0)) * (phase.givens >= 0)[:, None, None, None]
        else:
            begins = w.new_zeros((len(phase.segments), w.shape[1], w.shape[-1], u.shape[-1]), dtype=torch.float32)
        before, made, after = scanned(w[own], u[own], k[own], decay[own], begins, phase.ends)
        ends = after if ends is None else ends
        starts.append(before)
        changes.append(made)
    assert ends is not None
    return (*(x[0] if len(x) == 1 else torch.cat(x) for x in (starts, changes)), ends)  # type: ignore[return-value]


def inverse_of_unit_lower(a: Tensor) -> Tensor:
    """(I + a)⁻¹ of strictly lower a (…, CHUNK, CHUNK), float32."""
    found: Tensor = _inverse(a)
    return found


@torch.library.custom_op("tidemill::inverse_of_unit_lower", mutates_args=())
def _inverse(a: Tensor) -> Tensor:
    if (fast := kernels(a.device.type)) is not None:
        return fast.inverse_of_unit_lower(a)  # type: ignore[no-any-return]
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    solved = torch.linalg.solve_triangular(a + one, one.expand_as(a), upper=False, unitriangular=True)
    return cast(Tensor, solved.contiguous())


@_inverse.register_fake
def _(a: Tensor) -> Tensor:
    return torch.empty_like(a)


def _setup(ctx: object, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)  # type: ignore[attr-defined]


def _backward(ctx: object, grad: Tensor) -> Tensor:
    (inverse,) = ctx.saved_tensors  # type: ignore[attr-defined]
    turned = inverse.transpose(-1, -2)
    return cast(Tensor, -(turned @ grad @ turned).tril(-1))


_inverse.register_autograd(_backward, setup_context=_setup)
