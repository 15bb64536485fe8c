"""What is done to a model's decoder layers before it learns: recompute some of them, compile them, offload what they
keep. None of it changes a number beyond rounding."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from tidemill.learn.logprob import HAS_TRITON
from tidemill.models import attention

if TYPE_CHECKING:
    from tidemill.config import Learn

OFFLOAD_BYTES = 1 << 20  # smaller tensors cost more to move than to keep


def prepare(model: Any, learn: Learn) -> None:
    if learn.recompute == "full":
        recompute(model, learn.recompute_every)
    on_accelerator = next(model.parameters()).device.type != "cpu"
    if learn.compile == "on" or (learn.compile == "auto" and on_accelerator and HAS_TRITON):
        compile_layers(model)


def layers_of(model: Any) -> list[Any]:
    return list(model.get_decoder().layers)


def recompute(model: Any, every: int = 1) -> None:
    """Keep the inputs alone of one layer in `every`, and compute the rest again when the backward pass needs it."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()  # transformers recomputes only in training mode; dropout is off by our attention and below
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for i, layer in enumerate(layers_of(model)):
        layer.gradient_checkpointing = i % every == 0


def compile_layers(model: Any, backend: str = "inductor") -> None:
    """One compilation serves all layers and all lengths.

    Attention stays outside: it has its own kernels, and its context differs from call to call.
    """
    AttentionInterface.register(attention.NAME, torch.compiler.disable(attention.attend))  # type: ignore[no-untyped-call]
    for layer in layers_of(model):
        layer.compile(dynamic=True, backend=backend)


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
