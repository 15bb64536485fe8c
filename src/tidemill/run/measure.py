"""The machine's part of a step's metrics, as the driver's process sees it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tidemill import device as devices
from tidemill.observe.machine import Sampler, Work, sampler
from tidemill.recipe.config import Config


class Machine:
    """Measure with the recipe's `price` and `devices`; MFU and the allocator's peak only where this process does the
    work."""

    def __init__(self, config: Config) -> None:
        kind, _ = ("cpu", 0) if config.device == "cpu" else devices.count()
        self._is_here = config.cluster.executor == "local" and config.learn.parallel.ranks == 1
        peak = devices.pick(config.device).peak() if self._is_here else None
        self._peak_flops = peak.flops if peak is not None else None
        self._devices = 1 if self._is_here else config.cluster.learners + config.cluster.rollouts
        self._devices = max(self._devices, config.learn.parallel.ranks)
        self._price = config.observe.price_per_device_hour
        self._has_allocator = kind != "cpu" and self._is_here
        self._sampler: Sampler = sampler(kind)

    def measure(
        self, measured: Mapping[str, float], seconds: float, tokens: float, parameters: int, run_seconds: float
    ) -> dict[str, float]:
        work = Work(
            seconds,
            tokens,
            rolled_tokens=measured.get("prompt_tokens", 0.0) + measured.get("made_tokens", 0.0),
            learned_tokens=measured.get("learned_tokens", 0.0),
            parameters=parameters,
            devices=self._devices,
            peak_flops=self._peak_flops,
            run_seconds=run_seconds,
            price_per_hour=self._price,
        )
        found = self._sampler.measure(work)
        if self._has_allocator:
            found["machine/device_memory_peak"] = float(torch.accelerator.max_memory_allocated())
        return found

    def close(self) -> None:
        self._sampler.close()
