"""What an engine serves: a version that is always whole, and where the next one is written.

Separated engines write the next version aside (on the device, or on the host where memory is short) and take it up
between two tokens; a transfer that fails leaves them as they were. Colocated engines do not serve while weights come,
so they are written in place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from tidemill.errors import ReshardError
from tidemill.reshard.move import Job, Moved, WeightWire, move
from tidemill.reshard.pack import Tensors

# Where the next version is written. device: beside the one that serves, exchanged with it; copy: the same, but copied
# into it, for an engine that holds on to its tensors' addresses; host: in host memory.
Aside = Literal["none", "device", "copy", "host"]
TORN = -1  # no whole version: a transfer in place failed


class Serving:
    """An engine's tensors and the version they are. `flip` is called by the engine at a token boundary."""

    def __init__(self, tensors: Tensors, version: int, aside: Aside = "none") -> None:
        self.tensors = tensors
        self.version = version
        self.arrived: int | None = None  # whole and aside, to be taken up
        self.aside = aside
        self._back: Tensors = tensors if aside == "none" else {n: _aside(t, aside) for n, t in tensors.items()}

    def receive(self, job: Job, wire: WeightWire) -> Moved:
        """Bring a new version in, whole or not at all. `job.targets` is chosen here."""
        if job.version <= self.version:
            raise ReshardError(f"version {job.version} is not newer than version {self.version}, which is served")
        self.arrived = None
        before = self.version
        if self.aside == "none":
            self.version = TORN
        moved = move(replace(job, targets=self._back), wire)
        if self.aside == "none":
            self.version = before
        self.arrived = job.version
        return moved

    def flip(self) -> int:
        """Serve what arrived, if anything did; gives the version now served."""
        if self.arrived is None:
            return self.version
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                if self.aside == "device":
                    tensor.data, self._back[name].data = self._back[name].data, tensor.data
                elif self.aside in ("copy", "host"):
                    tensor.copy_(self._back[name], non_blocking=True)
        self.version, self.arrived = self.arrived, None
        return self.version


def _aside(tensor: torch.Tensor, where: Aside) -> torch.Tensor:
    if where in ("device", "copy"):
        return torch.empty_like(tensor, requires_grad=False)
    pinned = tensor.device.type != "cpu"
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
