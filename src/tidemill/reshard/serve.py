"""What an engine serves: a version that is always whole, and where the next one is written.

Where rollout goes on while weights come, they are written aside (on the device, or on the host where memory is short)
and taken up between two tokens; a transfer that fails leaves the engine as it was. Elsewhere they are written in place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from tidemill.reshard.move import Job, Moved, WeightWire, move
from tidemill.reshard.pack import Tensors

# Where the next version is written. device: beside the one that serves, exchanged with it; copy: the same, but copied
# into it, for an engine that holds on to its tensors' addresses; host: in host memory.
Aside = Literal["none", "device", "copy", "host"]
TORN = -1  # no whole version: none came yet, or a transfer in place failed


class Serving:
    """An engine's tensors and the version they are. `flip` is called by the engine at a token boundary."""

    def __init__(self, tensors: Tensors, version: int = TORN, aside: Aside = "none") -> None:
        self.tensors = tensors
        self.version = version
        self.arrived: int | None = None  # whole and aside, to be taken up
        self.aside = aside
        self._back: Tensors = tensors if aside == "none" else {n: _aside(t, aside) for n, t in tensors.items()}

    def receive(self, job: Job, wire: WeightWire) -> Moved:
        """Bring a version in, whole or not at all. `job.targets` is chosen here."""
        self.arrived = None
        if self.aside == "none":
            self.version = TORN
        moved = move(replace(job, targets=self._back), wire)
        if self.aside == "none":
            self.version = job.version
        else:
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
                else:
                    tensor.copy_(self._back[name], non_blocking=True)
        self.version, self.arrived = self.arrived, None
        return self.version


def _aside(tensor: torch.Tensor, where: Aside) -> torch.Tensor:
    if where in ("device", "copy"):
        return torch.empty_like(tensor, requires_grad=False)
    pinned = tensor.device.type != "cpu"
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
