"""What a rank really sends and holds, seen from under the program: every collective and every tensor passes here."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Traffic(TorchDispatchMode):
    """Bytes that this rank sends, counted as ring algorithms send them, by operation and size of group."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.sent.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._schema.name.split("::")[1], args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        if name in ("wait_tensor", "barrier", "monitored_barrier_"):
            return
        tensors = [t for t in tree_iter(args) if isinstance(t, Tensor)]
        size = next((g.size() for g in map(_group, args) if g is not None), 1)
        share = (size - 1) / size
        nbytes = [t.numel() * t.element_size() for t in tensors]
        if name in ("_allgather_base_", "_reduce_scatter_base_", "allgather_", "reduce_scatter_"):
            moved = share * (max(nbytes) if "base" in name else _listed(args))
        elif name == "allreduce_":
            moved = 2 * share * sum(nbytes)
        elif name in ("alltoall_base_", "alltoall_"):
            moved = share * nbytes[-1]
        elif name in ("send", "broadcast_"):
            moved = float(sum(nbytes))
        elif name in ("recv_", "recv_any_source_"):
            moved = 0.0
        else:
            raise NotImplementedError(f"bytes of {name} are not counted")
        self.sent[f"{name}/{size}"] += int(moved)
        self.calls[f"{name}/{size}"] += 1


def _listed(args: Any) -> float:
    """All-gather into a list of tensors: the sum of what every rank gave."""
    outputs = args[0]
    return float(sum(t.numel() * t.element_size() for t in tree_iter(outputs) if isinstance(t, Tensor)))


def _group(arg: Any) -> Any:
    if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
        return dist.ProcessGroup.unbox(arg)
    return None


class Peak(TorchDispatchMode):
    """The most bytes of tensors alive at once, from those given at the start on."""

    def __init__(self, held: list[Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}
        for tensor in held:
            self._see(tensor)

    def __enter__(self) -> Peak:
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resized()  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def _resized(self) -> Any:
        """FSDP gives gathered weights back by making their storage empty, which no dispatcher sees."""
        real = self._resize

        def resize(storage: Any, size: int) -> Any:
            key, out = storage._cdata, real(storage, size)
            if key in self._sizes:
                self._change(key, size)
            return out

        return resize

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for found in tree_iter(out):
            if isinstance(found, Tensor):
                self._see(found)
        return out

    def _see(self, tensor: Tensor) -> None:
        from torch.distributed.tensor import DTensor

        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = 0
        self._change(key, storage.nbytes())
        weakref.finalize(storage, self._gone, key)

    def _change(self, key: int, size: int) -> None:
        self.now += size - self._sizes[key]
        self._sizes[key] = size
        self.most = max(self.most, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
