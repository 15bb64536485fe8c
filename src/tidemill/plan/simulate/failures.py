"""What goes wrong in a simulation: devices that are slower than their kind, workers that die, links that others use."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemill.plan.simulate.mirror import Mirror
    from tidemill.plan.simulate.starter import World
    from tidemill.plan.simulate.worker import SimulatedWorker

HOUR_S = 3600.0


@dataclass(slots=True)
class Faults:
    spread: float = 0.0  # of the logarithm of devices' speeds
    slow_share: float = 0.0  # of devices, that are slower by `slow_factor`
    slow_factor: float = 2.0
    mtbf_hours: float = 0.0  # of one device: the mean time between its failures; 0: none fails
    restart_s: float = 60.0  # until a worker is back: its process, its model
    contention: float = 0.0  # how much longer moving weights takes at most, because others use the links
    seed: int = 0
    _rng: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self._rng.seed(self.seed)

    def born(self, world: World, host: SimulatedWorker | Mirror) -> None:
        """Draw when it will die."""
        if self.mtbf_hours > 0 and dict(host.post.group.needs).keys() - {"CPU"}:
            world.kernel.after(self._rng.expovariate(1 / (self.mtbf_hours * HOUR_S)), lambda: self._die(world, host))

    def _die(self, world: World, host: SimulatedWorker | Mirror) -> None:
        if world.hosts.get(host.post.name) is host:
            host.kill()
            world.heard()

    def network(self, rng: random.Random) -> float:
        return 1.0 + rng.uniform(0, self.contention) if self.contention else 1.0


def speed_factor(rng: random.Random, spread: float, slow_share: float, slow_factor: float) -> float:
    """How much slower than its kind a device is."""
    own = rng.lognormvariate(0.0, spread) if spread else 1.0
    return own * (slow_factor if slow_share and rng.random() < slow_share else 1.0)
