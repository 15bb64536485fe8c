"""A stand-in for torch_npu on a machine without NPUs: a device `npu` that computes on the processor, refuses what an
Ascend 910B refuses, and counts launches, bytes, and how often the host waits. See tests/npu and docs/ascend.md."""

from __future__ import annotations

from typing import Any

import torch

__version__ = "2.13.0"
IS_STAND_IN = True


def _autoload() -> None:
    """Called by torch when it is imported; importing this module is enough."""


def _set_up() -> None:
    if hasattr(torch, "npu"):
        return
    from torch_npu import build

    native = build.load()
    _enforce(native)
    torch.utils.rename_privateuse1_backend("npu")
    from torch_npu import device, operators

    torch._register_device_module("npu", device)
    torch.utils.generate_methods_for_privateuse1_backend()
    operators.define()
    _register_hccl(native)


def _enforce(native: Any) -> None:
    from torch_npu import rules

    native.set_refused_dtypes(rules.REFUSED)
    native.set_reducible_dtypes(rules.REDUCIBLE)
    native.set_waiting(rules.WAITING)
    native.set_updatable(rules.UPDATABLE)
    for name, dtypes in rules.NARROW.items():
        native.set_narrow(name, dtypes)
    native.implement("aten", [name for name in rules.implemented() if _is_ours(name)])


# Computed without a kernel: by changing sizes and strides, or as allocation and copy.
_OWN = {
    "_local_scalar_dense", "_pin_memory", "_reshape_alias", "as_strided", "as_strided_", "clone", "contiguous", "copy_",
    "empty.memory_format", "empty_like", "empty_strided", "full", "is_pinned", "is_set_to", "new_empty_strided",
    "record_stream", "resize_", "resize_as_", "set_", "set_.source_Storage", "set_.source_Storage_storage_offset",
    "set_.source_Tensor", "squeeze", "squeeze.dim", "_to_copy", "unfold", "unsqueeze", "view", "_copy_from_and_resize",
    "_lazy_clone", "_fused_sdp_choice", "_to_sparse", "_to_sparse.sparse_dim",
}  # fmt: skip


def _is_ours(name: str) -> bool:
    """Whether an operator of the wheel's list is one of this torch's, with a kernel for each device."""
    if name in _OWN:
        return False
    plain, _, overload = name.partition(".")
    try:
        torch._C._get_schema(f"aten::{plain}", overload)
    except RuntimeError:
        return False  # of torch_npu's own, or of another torch
    return not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CompositeImplicitAutograd")


def _register_hccl(native: Any) -> None:
    import torch.distributed as dist

    if not dist.is_available():
        return

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return native.hccl_over(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend("hccl", create, devices=["npu"])


def __getattr__(name: str) -> Any:
    """torch_npu's operators are functions of the package, too."""
    if not name.startswith("npu_"):
        raise AttributeError(name)
    return getattr(torch.ops.npu, name)


_set_up()
