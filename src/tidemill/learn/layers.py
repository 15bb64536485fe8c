"""What is done to a model's decoder layers before it learns: recompute some of them, compile them, offload what they
keep. None of it changes a number beyond rounding."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch._functorch.config as partitioning
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from tidemill.device.compiling import follow_torch
from tidemill.errors import ModelError
from tidemill.learn import fp8
from tidemill.learn.logprob.tokens import can_fuse
from tidemill.models.attention import registry as attention
from tidemill.models.layers.forms import fuse
from tidemill.models.parts import decoder_of, layers_of

if TYPE_CHECKING:
    from tidemill.recipe.config import Learn

Recompute = Literal["selective", "mlp", "full"]
GATED = {"gate_proj", "up_proj", "down_proj"}  # children of an MLP whose activation can be computed again by itself
OFFLOAD_BYTES = 1 << 20  # smaller tensors cost more to move than to keep
# Of one layer, compiled: prompts shared or not, windows, with and without gradients, of several models. Beyond the
# compiler's own limit, which is 8, it gives up without an error, and layers are slow.
FORMS = 64


def prepare(model: Any, learn: Learn, fused: bool = True) -> None:
    """`fused`: norms and gates may be computed by other code than the modules' own."""
    if learn.fp8 != "none" and not fp8.attach(layers_of(model), learn.fp8):
        raise ModelError(
            f"learn.fp8={learn.fp8}, but no linear module of the layers has sides that are multiples of {fp8.MULTIPLE}",
            "set learn.fp8=none",
        )
    if learn.recompute != "none":
        recompute(model, learn.recompute, learn.recompute_every)
    if learn.compile == "on" or (learn.compile == "auto" and can_fuse(next(model.parameters()))):
        compile_layers(model, is_thrifty=learn.recompute in ("selective", "mlp"))
    elif fused and learn.fp8 == "none":
        fuse(model)


def recompute(model: Any, kind: Recompute, every: int = 1) -> None:
    """Keep less of one layer in `every`, and compute the rest again when the backward pass needs it.

    full: the layer's input alone is kept. mlp: everything outside the MLP, and its input. selective: everything but the
    MLP's activation, so no product is computed twice. The MLP is by far the widest part of a layer.
    """
    chosen = list(layers_of(model))[::every]
    if kind == "full":
        _recompute_whole(model, chosen)
        return
    for layer in chosen:
        mlp = getattr(layer, "mlp", None)
        if mlp is None or (kind == "selective" and dict(mlp.named_children()).keys() - {"act_fn"} != GATED):
            raise ModelError(
                f"learn.recompute={kind} does not know the MLP of {type(layer).__name__}", "use learn.recompute=full"
            )
        # Bound to its module, so that a copy of the model (the frozen reference) has forms of its own.
        mlp.forward = MethodType(_mlp_again if kind == "mlp" else _activation_again, mlp)


def _recompute_whole(model: Any, chosen: list[Any]) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": attention.serve_again})
    for layer in layers_of(model):
        layer.gradient_checkpointing = any(layer is one for one in chosen)
        # transformers recomputes only in training mode; modules inside stay out of it, so none draws dropout or noise.
        layer.training = layer.gradient_checkpointing


def _mlp_again(mlp: Any, *args: Any) -> Any:
    """Unlike transformers' recompute this lies inside the compiled layer, whose compiler then plans it."""

    def inside(*args: Any) -> Any:
        return type(mlp).forward(mlp, *args)

    return checkpoint(inside, *args, use_reentrant=False, preserve_rng_state=False)


def _activation_again(mlp: Any, x: Tensor) -> Any:
    def inside(gate: Tensor, up: Tensor) -> Any:
        """No gradient needs what the last product comes to, so the product itself is never computed again."""
        return mlp.down_proj(mlp.act_fn(gate) * up)

    return checkpoint(inside, mlp.gate_proj(x), mlp.up_proj(x), use_reentrant=False, preserve_rng_state=False)


def compile_layers(model: Any, backend: Any = "inductor", is_thrifty: bool = False) -> None:
    """One compilation serves all layers and all lengths. Thrifty: what no product gave is not kept but made again.

    Where attention's context can be traced a layer is one graph, or else attention stays outside and cuts it in four.
    """
    AttentionInterface.register(attention.NAME, _attend)
    follow_torch()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, FORMS)
    chosen = _thrifty(backend) if is_thrifty else backend
    for layer in layers_of(model):
        layer.compile(dynamic=True, backend=chosen)


_attend_outside: Any = torch.compiler.disable(attention.attend)  # type: ignore[no-untyped-call]


def _attend(*given: Any, tide: Any = None, **how: Any) -> Any:
    attend: Any = attention.attend if attention.is_traced(tide) else _attend_outside
    return attend(*given, tide=tide, **how)


@cache  # another function would be another compiler, and compile everything again
def _thrifty(backend: Any) -> Any:
    """By itself the compiler keeps a norm's output for the gradient of the product that took it. Made again from the
    norm's input, which is kept anyway, it costs one pass over memory, and with `mlp` a layer keeps a third less."""
    compiled = torch._dynamo.lookup_backend(backend)

    def compile_thriftily(graph: Any, inputs: Any, **how: Any) -> Any:
        with partitioning.patch(
            ban_recompute_materialized_backward=False,
            ban_recompute_used_far_apart=False,
            ban_recompute_long_fusible_chains=False,
        ):
            return compiled(graph, inputs, **how)

    return compile_thriftily


def undo(model: Any) -> None:
    """The model as it was before `prepare`."""
    AttentionInterface.register(attention.NAME, attention.attend)
    decoder_of(model).gradient_checkpointing_disable()
    model.eval()
    fp8.detach(layers_of(model))
    for layer in layers_of(model):
        layer._compiled_call_impl = None
        if hasattr(layer, "mlp"):
            layer.mlp.__dict__.pop("forward", None)


def kept_activations(learn: Learn, model: Any) -> AbstractContextManager[Any]:
    """Around a forward pass: where what it keeps for the backward pass lies."""
    if learn.offload == "none":
        return nullcontext()
    return offloaded({p.untyped_storage().data_ptr() for p in model.parameters()})


def offloaded(weights: set[int]) -> AbstractContextManager[Any]:
    """Large activations to the host; not `weights`, which stay anyway, nor tensors whose strides a kernel relies on."""

    def pack(x: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        is_small = x.numel() * x.element_size() < OFFLOAD_BYTES
        if is_small or not x.is_contiguous() or x.untyped_storage().data_ptr() in weights:
            return x
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.device.type != "cpu")
        return x.device, host.copy_(x, non_blocking=True)

    def unpack(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept[1].to(kept[0], non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
