"""What runs inside a vLLM worker: the one call that vLLM's own interface lacks, added by its `worker_extension_cls`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


class WeightLoader:
    """Becomes a base class of vLLM's worker, so names here must not be names there."""

    device: Any
    model_runner: Any

    def tidemill_load(self, named: Iterable[tuple[str, Tensor]]) -> int:
        """Take tensors with their Hugging Face names into the weights that serve now; how many parameters changed.

        Through vLLM's reload and not the module's `load_weights` alone: a weight that was packed or copied after
        loading (a tied output layer on a CPU) would keep its old value without any error."""
        count = 0

        def counted() -> Iterable[tuple[str, Tensor]]:
            nonlocal count
            for name, tensor in named:
                count += 1
                yield name, tensor.detach()

        packing = _experts_packed_anew(self.model_runner.get_model()) if _is_cpu(self.device) else nullcontext()
        with torch.no_grad(), torch.device(self.device), packing:
            self.model_runner.reload_weights(weights_iterator=counted())
        return count

    def tidemill_adapted(self) -> list[str]:
        """Names of the modules that take an adapter, the parts of a fused one by their own names."""
        model = self.model_runner.get_model()
        fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        found = []
        for name, _ in model.named_modules():
            if name.endswith(".base_layer"):
                parent, _, last = name.removesuffix(".base_layer").rpartition(".")
                found += [f"{parent}.{part}" for part in fused.get(last, [last])]
        return found


def _is_cpu(device: Any) -> bool:
    return torch.device(device).type == "cpu"


@contextmanager
def _experts_packed_anew(model: Any) -> Iterator[None]:
    """Within the context, vLLM makes kernels anew of experts that it loads: on a CPU it packs their weights only then
    (0.32), and a reload alone would leave plain weights to a kernel that reads packed ones."""
    methods = {id(method): method for m in model.modules() if (method := getattr(m, "quant_method", None)) is not None}
    before = [(one, one.moe_kernel) for one in methods.values() if getattr(one, "moe_kernel", None) is not None]
    for method, _ in before:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in before:  # of layers that had no part in it
            if method.moe_kernel is None:
                method.moe_kernel = kernel
