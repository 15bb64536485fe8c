"""Decoder layers of the Llama family in their fused form, and which modules of a model get one.

A layer is a norm, attention with rotary positions, a norm, a gated MLP, and two residual sums. Here queries, keys and
values are one product, gate and up another; norms and rotary positions one pass; sums are part of the product before
them, and of the norm behind them on the way back.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tidemill.device import host
from tidemill.models import families
from tidemill.models.attention.registry import NAME, AttentionForm, Context, attention_window
from tidemill.models.layers import fused
from tidemill.models.layers.fused import Fork, Placed, added, gated, has_hooks, is_plain, through

CLOSE = 1e-5  # how far a fused module may be from the plain one
Positions = tuple[Tensor, Tensor]  # cos and sin, (1, tokens, dim)


def fuse(model: Any) -> int:
    """How many modules now run fused."""
    parameter = next(model.parameters(), None)
    if parameter is None or not is_plain(parameter) or fused.code() is None:
        return 0
    host.bound_product_caches()
    count = 0
    for module in model.modules():
        for fits, forward in FORMS:
            if fits(module) and "forward" not in vars(module) and _agrees(module, forward):
                module.forward = MethodType(forward, module)
                count += 1
    return count


def layer(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    position_embeddings: Positions | None = None,
    **kwargs: Any,
) -> Tensor:
    """The fused form of a decoder layer's forward."""
    attention, mlp, norms = module.self_attn, module.mlp, (module.input_layernorm, module.post_attention_layernorm)
    is_whole = not any(has_hooks(m) for m in (attention, mlp, *norms))
    if not (is_whole and _is_known(attention, hidden_states, position_embeddings, past_key_values, kwargs)):
        given = (attention_mask, position_ids, past_key_values, use_cache, position_embeddings)
        return type(module).forward(module, hidden_states, *given, **kwargs)  # type: ignore[no-any-return]
    assert position_embeddings is not None
    x = hidden_states.squeeze(0).contiguous()
    x, h = Fork.apply(x, norms[0].weight, norms[0].variance_epsilon)  # type: ignore[no-untyped-call]
    x = added(x, _attended(attention, h, position_embeddings, kwargs["tide"]), attention.o_proj)
    x, h = Fork.apply(x, norms[1].weight, norms[1].variance_epsilon)  # type: ignore[no-untyped-call]
    is_own = _is_form(mlp, fused.mlp)
    x = added(x, gated(mlp, h), mlp.down_proj) if is_own else x + mlp(h.unsqueeze(0)).squeeze(0)
    return x.unsqueeze(0)


def attention(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: Positions,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The fused form of an attention layer's forward."""
    if not _is_known(module, hidden_states, position_embeddings, past_key_values, kwargs):
        given = (position_embeddings, attention_mask, past_key_values)
        return type(module).forward(module, hidden_states, *given, **kwargs)  # type: ignore[no-any-return]
    made = _attended(module, hidden_states.squeeze(0), position_embeddings, kwargs["tide"])
    return module.o_proj(made).unsqueeze(0), None


def _attended(module: Any, x: Tensor, positions: Positions, context: Context) -> Tensor:
    """x (tokens, width) → what the heads give, (tokens, heads dim)."""
    rows = through(x, module.q_proj, module.k_proj, module.v_proj)
    norms = (module.q_norm.weight, module.k_norm.weight) if hasattr(module, "q_norm") else None
    eps = module.q_norm.variance_epsilon if norms is not None else 0.0
    dim = module.head_dim
    heads = len(module.q_proj.weight) // dim, len(module.k_proj.weight) // dim
    cos, sin = (t.squeeze(0).contiguous() for t in positions)
    q, k, v = Placed.apply(rows, norms, cos, sin, heads, eps, *(norms or ()))  # type: ignore[no-untyped-call]
    out = context.attend(module.layer_idx, q, k, v, AttentionForm(module.scaling, attention_window(module)))
    return out.reshape(len(x), -1)


def _is_known(module: Any, x: Tensor, positions: Positions | None, cache: Any, given: dict[str, Any]) -> bool:
    """One row of plain tensors, with a context of ours that says who sees whom."""
    if positions is None or cache is not None or given.get("tide") is None or len(x) != 1:
        return False
    inside = (module.q_norm, module.k_norm) if hasattr(module, "q_norm") else ()
    return not any(has_hooks(m) for m in inside) and all(is_plain(t) for t in (x, *positions, *module.parameters()))


def _is_form(module: Any, forward: Any) -> bool:
    own = vars(module).get("forward")
    return _is_gated_mlp(module) and (own is None or getattr(own, "__func__", None) is forward)


def _is_linear(module: Any) -> bool:
    return type(module) is nn.Linear and fused.is_mkl_slow()


def _is_norm(module: Any) -> bool:
    return isinstance(getattr(module, "weight", None), Tensor) and hasattr(module, "variance_epsilon")


def _is_gated_mlp(module: Any) -> bool:
    parts = ("gate_proj", "up_proj", "down_proj")
    return all(isinstance(getattr(module, part, None), nn.Linear) for part in parts) and hasattr(module, "act_fn")


def _is_class(module: Any, kind: str) -> bool:
    """Whether it is that kind of module of a family whose layers are Llama's."""
    return type(module).__name__ in {f"{prefix}{kind}" for prefix in families.llama_forms().values()}


def _is_attention(module: Any) -> bool:
    is_ours = getattr(getattr(module, "config", None), "_attn_implementation", None) == NAME
    return is_ours and _is_class(module, "Attention")


def _is_layer(module: Any) -> bool:
    return _is_class(module, "DecoderLayer") and _is_attention(module.self_attn) and _is_gated_mlp(module.mlp)


FORMS = (
    (_is_norm, fused.norm),
    (_is_gated_mlp, fused.mlp),
    (_is_linear, fused.linear),
    (_is_attention, attention),
    (_is_layer, layer),
)


@torch.no_grad()
def _agrees(module: Any, forward: Any) -> bool:
    """Whether the fused form gives what the module itself gives: some norms add 1 to their weight, some gates are not
    silu, some rotary positions are turned in pairs."""
    try:
        ours, theirs = _tried(module, forward)
    except Exception:  # of another kind altogether: it wants more than one argument, or another one
        return False
    return torch.allclose(ours, theirs, rtol=CLOSE, atol=CLOSE)


def _tried(module: Any, forward: Any) -> tuple[Tensor, Tensor]:
    if _is_attention(module) or _is_layer(module):
        own = module if _is_attention(module) else module.self_attn
        given = _positions_of(own)
        x = _ramp(1, 3, own.config.hidden_size)
        return _first(forward(module, x, **given)), _first(module(x, **given))
    width = module.gate_proj.in_features if _is_gated_mlp(module) else module.weight.shape[-1]
    x = _ramp(1, fused.MANY_ROWS if _is_linear(module) else 3, width)
    return forward(module, x), module(x)


def _positions_of(attention: Any) -> dict[str, Any]:
    angles = torch.linspace(0.0, 3.0, 3 * attention.head_dim).reshape(1, 3, -1)
    return {"position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None, "tide": _Last()}


def _ramp(*shape: int) -> Tensor:
    return torch.linspace(-2.0, 2.0, torch.Size(shape).numel()).reshape(shape)


def _first(out: Any) -> Tensor:
    found: Tensor = out[0] if isinstance(out, tuple) else out
    return found


class _Last:
    """As an attention context: no softmax, but every number of q, k and v counts."""

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        return q * k.repeat_interleave(groups, 1) + v.repeat_interleave(groups, 1)
