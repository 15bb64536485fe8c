"""The machines' part of a step's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from tidemill import device as devices
from tidemill.device import host
from tidemill.device.peaks import PEAKS
from tidemill.flow.workers import MachineReport, Workers
from tidemill.models.shape import shape_of
from tidemill.observe.machine import combined, sampler
from tidemill.plan import calibration as calibrations
from tidemill.plan import hardware
from tidemill.plan.calibration import Calibration
from tidemill.recipe.config import Config
from tidemill.run.work import shares, work_of


class Machine:
    """Measures with the recipe's price and devices. Workers that are processes of their own read their devices
    themselves; in one process the driver reads those of all roles."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._is_here = config.cluster.executor == "local"
        ranks = config.learn.parallel.ranks
        own = devices.pick(config.device) if self._is_here else None
        self._kind = own.kind if own is not None else "cpu"
        self._report = MachineReport()
        if own is not None:
            peak = own.peak()
            self._report = MachineReport(own.kind, own.name, peak.flops if peak is not None else 0.0)
        self._devices = max(ranks, 1 if self._is_here else config.cluster.learners + config.cluster.rollouts)
        used = range(ranks) if ranks > 1 else [own.index if own is not None else 0]
        self._sampler = sampler(self._kind, used)
        self._shape = shape_of(config.model)

    def begin(self) -> None:
        """A step begins."""
        self._sampler.begin()

    def measure(
        self, workers: Workers, measured: Mapping[str, float], seconds: float, tokens: float, run_seconds: float
    ) -> dict[str, float]:
        told, config = workers.machines, workers.config
        found = combined(
            self._sampler.readings(), workers.home, {name: (one.node, one.readings) for name, one in told.items()}
        )
        report = next((one for one in told.values() if one.kind != "cpu"), self._report)
        is_on_devices = report.kind != "cpu"
        joules = found.get("machine/energy_device_j" if is_on_devices else "machine/energy_host_j")
        if joules is not None and tokens:
            found["machine/joules_per_token"] = joules / tokens
        if self._is_here and is_on_devices:
            found["machine/device_memory_peak"] = float(PEAKS.whole().device)
        if not is_on_devices:
            found = {name: value for name, value in found.items() if name != "machine/energy_device_j"}
        work = work_of(config, self._shape, workers.parameters, measured)
        peak = report.flops
        found |= shares(config, work, measured, peak, _rates(report.kind, report.name, config.threads))
        if peak and seconds and work:
            total = sum(one.flops for one in work.values())
            found["machine/mfu"] = total / (seconds * self._devices * peak)
        if config.observe.price_per_device_hour is not None:
            found["cost/so_far"] = config.observe.price_per_device_hour * self._devices * run_seconds / 3600
        return found

    def close(self) -> None:
        self._sampler.close()


@cache
def _rates(kind: str, name: str, threads: int | None) -> Calibration | None:
    """Those that were measured on this kind of device; a processor's only where they were measured on one of its
    name, with as many threads."""
    if kind != "cpu":
        return calibrations.find(hardware.find(name) or name, kind)
    found = calibrations.find("cpu", "cpu", threads or host.cores())
    return found if found is not None and found.versions.get("processor") == host.processor() else None
