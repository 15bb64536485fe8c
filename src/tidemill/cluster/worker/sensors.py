"""What a worker that is a process of its own reads of its device and machine."""

from __future__ import annotations

from tidemill import device
from tidemill.cluster.assignment import Assignment
from tidemill.flow.workers import MachineReport
from tidemill.observe.machine import sampler


class Sensors:
    """A post without a device shares its machine's readings with the others there."""

    def __init__(self, task: Assignment) -> None:
        own = device.pick(task.device)
        peak = own.peak()
        self._about = own.kind, own.name, peak.flops if peak is not None else 0.0, task.node
        self._sampler = sampler(own.kind, [own.index])

    def begin(self) -> None:
        self._sampler.begin()

    def report(self) -> MachineReport:
        return MachineReport(*self._about, self._sampler.readings())

    def close(self) -> None:
        self._sampler.close()
