"""Weights from a trainer to engines in any program that has a process group, such as a plain torchrun script.

    publish(model, to=None)        # on the ranks that learn
    publish(None, to=engine)       # on the ranks that roll out

Every rank of the group calls it. A source is a module or named tensors: whole ones, or DTensors as FSDP2 and tensor
parallelism cut them. A target is a module, named tensors, or anything with a `model` and a `refresh()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from tidemill.device import plain
from tidemill.errors import ReshardError
from tidemill.reshard.layouts.dtensor import from_tensors, local_tensors
from tidemill.reshard.layouts.layout import Layout, merge
from tidemill.reshard.layouts.record import from_plain, to_plain
from tidemill.reshard.move import BUCKET_BYTES, BufferRing, GroupWire, Job, Moved, Verify, move
from tidemill.reshard.pack import Tensors
from tidemill.reshard.plan import Plan, plan
from tidemill.reshard.wires.one_process import OneProcessWire

WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "base_model.model.")


def publish(
    source: Any = None,
    *,
    to: Any = None,
    group: dist.ProcessGroup | None = None,
    verify: Verify = "sample",
    bucket_bytes: int = BUCKET_BYTES,
) -> Moved:
    """Bring the weights of `source`, over all ranks of `group`, to every rank's `to`. For a publish each step make a
    `Publisher`: it plans once."""
    return Publisher(source, to=to, group=group, verify=verify, bucket_bytes=bucket_bytes)()


class Publisher:
    """The planned way from one set of tensors to another; call it whenever the source has new weights.

    A source or target may also be a pair of a `Layout` and local tensors, for cuts that tensors cannot tell of
    themselves: `reshard.layouts.parallel.learner` and `engine` make those of Megatron and of vLLM."""

    def __init__(
        self,
        source: Any = None,
        *,
        to: Any = None,
        group: dist.ProcessGroup | None = None,
        verify: Verify = "sample",
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.verify: Verify = verify
        self.version = 0
        self._group = group
        self.rank, self.size = _place(group)
        held, self._given = _described(source, self.rank)
        wanted, self._targets = _described(_model_of(to), self.rank)
        self._refresh = getattr(to, "refresh", None)
        self.plan: Plan = plan(self._all(held), self._all(wanted))
        device = next((t.device for t in [*self._given.values(), *self._targets.values()]), torch.device("cpu"))
        self._wire: GroupWire | OneProcessWire = (
            OneProcessWire(bucket_bytes)
            if self.size == 1
            else GroupWire(BufferRing(bucket_bytes=bucket_bytes, device=device), group)
        )

    def __call__(self) -> Moved:
        """Move the weights that the source has now. Returns the bytes and seconds of this rank; raises on every rank if
        one of them cannot finish."""
        self.version += 1
        sources = local_tensors(self._given)
        moved = move(Job(self.plan, self.rank, sources, self._targets, self.version, self.verify), self._wire)
        if self._refresh is not None:
            self._refresh()
        return moved

    def _all(self, own: Layout) -> Layout:
        """Join what every rank says of its tensors."""
        if self.size == 1:
            return own
        return merge(from_plain(record) for record in plain.gather(to_plain(own), self.size, self._group))


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def _model_of(to: Any) -> Any:
    """An engine's model; anything else as it is."""
    return to.model if hasattr(to, "refresh") and isinstance(getattr(to, "model", None), torch.nn.Module) else to


def _described(given: Any, rank: int) -> tuple[Layout, Tensors]:
    if given is None:
        return Layout(()), {}
    if isinstance(given, tuple):
        layout, tensors = given
        return layout, dict(tensors)
    if not isinstance(given, torch.nn.Module | Mapping):
        raise ReshardError(
            f"{type(given).__name__} is no source or target of weights",
            "give a module, named tensors, an engine, or a pair of a Layout and tensors",
        )
    tensors = dict(given.state_dict() if isinstance(given, torch.nn.Module) else given)
    named = {_name(name): tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
    return from_tensors(named, rank), named


def _name(name: str) -> str:
    """The name that the module had before it was wrapped."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "") if wrapper != "module." else name.removeprefix(wrapper)
    return name
