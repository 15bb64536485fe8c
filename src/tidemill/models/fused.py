"""Norms, gates and rotary positions of a model's layers in one pass each, forward and backward, for float32 on a CPU
(`fused.c`); and matrix products by the library that is faster on this processor.

A small model spends a fifth of a learning step between its matrix products. A module is replaced only if the fused form
gives what the module gives, tried at once; where there is no compiler, or a tensor is of another kind, modules do as
they always did.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from tidemill.device.compiled import library, over_rows
from tidemill.models.attention import NAME, attend, attention_window

SOURCE = Path(__file__).with_name("fused.c")
ELEMENTS = 4096  # handed to a thread as one row
CLOSE = 1e-5  # how far a fused module may be from the plain one
MANY_ROWS = 512  # fewer make a product too small to gain
ATTENTIONS = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")


@cache
def _library() -> ctypes.CDLL | None:
    found = library(SOURCE)
    if found is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        found.tm_norm.argtypes = [pointer] * 4 + [number] * 3 + [ctypes.c_float]
        found.tm_norm_back.argtypes = [pointer] * 6 + [number] * 3
        found.tm_gated.argtypes = [pointer] * 3 + [number] * 2
        found.tm_gated_back.argtypes = [pointer] * 5 + [number] * 2
        found.tm_turn.argtypes = [pointer] * 4 + [number] * 4 + [ctypes.c_int]
    return found


class _Norm(torch.autograd.Function):
    """x / rms(x) * weight over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        code = _library()
        assert code is not None
        x, dim = x.contiguous(), x.shape[-1]
        y, scales = torch.empty_like(x), torch.empty(x.numel() // dim)
        pointers = [t.data_ptr() for t in (x, weight, y, scales)]
        over_rows(lambda first, last: code.tm_norm(*pointers, first, last, dim, eps), len(scales))
        ctx.save_for_backward(x, weight, scales)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        code = _library()
        assert code is not None
        x, weight, scales = ctx.saved_tensors
        dy, dim, dx = dy.contiguous(), x.shape[-1], torch.empty_like(x)
        pointers = [t.data_ptr() for t in (x, weight, scales, dy, dx)]
        parts: dict[int, Tensor] = {}

        def run(first: int, last: int) -> None:
            parts[first] = torch.zeros(dim)
            code.tm_norm_back(*pointers, parts[first].data_ptr(), first, last, dim)

        over_rows(run, len(scales))
        return dx, torch.stack([parts[first] for first in sorted(parts)]).sum(0), None


class _Gated(torch.autograd.Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        code = _library()
        assert code is not None
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        pointers = [t.data_ptr() for t in (gate, up, y)]
        _over_elements(lambda first, last: code.tm_gated(*pointers, first, last), gate.numel())
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        code = _library()
        assert code is not None
        gate, up = ctx.saved_tensors
        dy, dgate, dup = dy.contiguous(), torch.empty_like(gate), torch.empty_like(up)
        pointers = [t.data_ptr() for t in (gate, up, dy, dgate, dup)]
        _over_elements(lambda first, last: code.tm_gated_back(*pointers, first, last), gate.numel())
        return dgate, dup


class _Turned(torch.autograd.Function):
    """x (tokens, heads, dim) turned to the positions whose cos and sin (tokens, dim) are given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(dy, cos, sin, True), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, is_back: bool) -> Tensor:
    code, x = _library(), x.contiguous()
    assert code is not None
    tokens, heads, dim = x.shape
    if cos.shape != (tokens, dim) or sin.shape != (tokens, dim):
        raise RuntimeError(f"positions of {tuple(cos.shape)} do not fit {tuple(x.shape)}")
    y = torch.empty_like(x)
    pointers = [t.data_ptr() for t in (x, cos, sin, y)]
    over_rows(lambda first, last: code.tm_turn(*pointers, first, last, heads, dim, int(is_back)), tokens)
    return y


class _Product(torch.autograd.Function):
    """x @ weight.T by oneDNN, forward and towards x. Towards the weight, MKL is the faster on every processor tried."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        dx = _onednn(dy.contiguous(), weight.t().contiguous(), None) if ctx.needs_input_grad[0] else None
        dweight = rows.t() @ x.view(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        return dx, dweight, rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return made


@cache
def _is_mkl_slow() -> bool:
    """MKL takes its fast paths on its maker's processors alone; a fifth is lost on others."""
    try:
        makers = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("vendor_id")]
    except OSError:
        return False
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_both and bool(makers) and "GenuineIntel" not in makers[0]


def _over_elements(run: Any, count: int) -> None:
    rows = -(-count // ELEMENTS)
    over_rows(lambda first, last: run(first * ELEMENTS, min(last * ELEMENTS, count)), rows)


def _is_plain(x: Tensor) -> bool:
    """A whole float32 tensor in host memory: not a piece of one, nor one that is only traced."""
    return type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu" and x.dtype == torch.float32


def _norm_forward(module: Any, hidden_states: Tensor) -> Tensor:
    if not (_is_plain(hidden_states) and _is_plain(module.weight)):
        return type(module).forward(module, hidden_states)  # type: ignore[no-any-return]
    return _Norm.apply(hidden_states, module.weight, module.variance_epsilon)  # type: ignore[no-untyped-call, no-any-return]


def _mlp_forward(module: Any, x: Tensor) -> Tensor:
    gate, up = module.gate_proj(x), module.up_proj(x)
    both = _Gated.apply(gate, up) if _is_plain(gate) and _is_plain(up) else module.act_fn(gate) * up  # type: ignore[no-untyped-call]
    return module.down_proj(both)  # type: ignore[no-any-return]


def _attention_forward(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The module's own steps, but tokens stay outermost until attention, which wants them so."""
    cos, sin = position_embeddings
    is_known = past_key_values is None and len(hidden_states) == 1
    if not (is_known and all(_is_plain(t) for t in (hidden_states, cos, sin, *module.parameters()))):
        given = (position_embeddings, attention_mask, past_key_values)
        return type(module).forward(module, hidden_states, *given, **kwargs)  # type: ignore[no-any-return]
    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    q, k, v = (project(hidden_states).view(shape) for project in (module.q_proj, module.k_proj, module.v_proj))
    if hasattr(module, "q_norm"):
        q, k = module.q_norm(q), module.k_norm(k)
    turns = cos[0].contiguous(), sin[0].contiguous()
    q, k = (_Turned.apply(t[0], *turns) for t in (q, k))  # type: ignore[no-untyped-call]
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v[0]))
    how = {"scaling": module.scaling, "sliding_window": attention_window(module), **kwargs}
    out, _ = attend(module, q, k, v, attention_mask, **how)
    return module.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


def _linear_forward(module: Any, x: Tensor) -> Tensor:
    is_many = x.numel() >= MANY_ROWS * x.shape[-1]
    if not (is_many and _is_plain(x) and _is_plain(module.weight)):
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    return _Product.apply(x, module.weight, module.bias)  # type: ignore[no-untyped-call, no-any-return]


def _is_linear(module: Any) -> bool:
    return type(module) is torch.nn.Linear and _is_mkl_slow()


def _is_norm(module: Any) -> bool:
    return isinstance(getattr(module, "weight", None), Tensor) and hasattr(module, "variance_epsilon")


def _is_gated_mlp(module: Any) -> bool:
    parts = ("gate_proj", "up_proj", "down_proj")
    return all(isinstance(getattr(module, part, None), torch.nn.Linear) for part in parts) and hasattr(module, "act_fn")


def _is_attention(module: Any) -> bool:
    """Of the family whose layers are alike; a context of ours says who sees whom."""
    is_ours = getattr(getattr(module, "config", None), "_attn_implementation", None) == NAME
    return is_ours and type(module).__name__ in ATTENTIONS


def fuse(model: Any) -> int:
    """How many modules now run fused."""
    parameter = next(model.parameters(), None)
    if parameter is None or not _is_plain(parameter) or _library() is None:
        return 0
    fused = 0
    for module in model.modules():
        for fits, forward in FORMS:
            if fits(module) and "forward" not in vars(module) and _agrees(module, forward):
                module.forward = MethodType(forward, module)
                fused += 1
    return fused


FORMS = (
    (_is_norm, _norm_forward),
    (_is_gated_mlp, _mlp_forward),
    (_is_linear, _linear_forward),
    (_is_attention, _attention_forward),
)


@torch.no_grad()
def _agrees(module: Any, forward: Any) -> bool:
    """Whether the fused form gives what the module itself gives: some norms add 1 to their weight, some gates are not
    silu, some rotary positions are turned in pairs."""
    if _is_attention(module):
        return _attention_agrees(module, forward)
    width = module.gate_proj.in_features if _is_gated_mlp(module) else module.weight.shape[-1]
    rows = MANY_ROWS if _is_linear(module) else 3
    x = torch.linspace(-2.0, 2.0, rows * width).reshape(1, rows, width)
    try:
        return torch.allclose(forward(module, x), module(x), rtol=CLOSE, atol=CLOSE)
    except RuntimeError:
        return False


def _attention_agrees(module: Any, forward: Any) -> bool:
    tokens, dim = 3, module.head_dim
    x = torch.linspace(-2.0, 2.0, tokens * module.config.hidden_size).reshape(1, tokens, -1)
    angles = torch.linspace(0.0, 3.0, tokens * dim).reshape(1, tokens, dim)
    given = {"position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None, "tide": _Last()}
    try:
        return torch.allclose(forward(module, x, **given)[0], module(x, **given)[0], rtol=CLOSE, atol=CLOSE)
    except RuntimeError:
        return False


class _Last:
    """As an attention context: no softmax, but every number of q, k and v counts."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        return q * k.repeat_interleave(groups, 1) + v.repeat_interleave(groups, 1)
