"""What a command asks for: a recipe on a cluster, with lengths, as a model of time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tidemill.device import host
from tidemill.errors import ConfigError, did_you_mean
from tidemill.plan import calibration, hardware, lengths
from tidemill.plan.hardware import SHEETS, Machines
from tidemill.plan.lengths import Lengths
from tidemill.plan.time_model import TimeModel
from tidemill.recipe import load as recipes
from tidemill.recipe.config import Config

SHORT = re.compile(r"(?:(\d+)x)?(\d+)x([A-Za-z0-9]+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Asked:
    config: Config
    model: TimeModel
    lengths: Lengths
    said: str  # what the times rest on

    @property
    def machines(self) -> Machines:
        return self.model.machines


def asked(
    recipe: str,
    overrides: Sequence[str] = (),
    cluster: str = "",
    length: str | None = None,
    measured: str | None = None,
) -> Asked:
    """`cluster`: a file, `8xH100`, `24x16x910C` (nodes × devices), or nothing for this machine. `measured`: a
    calibration's file, in place of the device's own."""
    config = recipes.load(recipe, overrides).config
    machines = machines_of(cluster)
    made = calibration.load(measured) if measured else None
    model = TimeModel(config, machines, made=made)
    own = lengths.of(config, length)
    said = f"{model.made.device}: {model.made.source}, {model.made.made}; {own.said}"
    return Asked(config, model, own, said)


def machines_of(cluster: str) -> Machines:
    if not cluster:
        return hardware.this_machine(host.cores())
    short = SHORT.fullmatch(cluster)
    if short is None or Path(cluster).exists():
        return hardware.load(cluster)
    nodes, devices, name = short.groups()
    known = {sheet.lower(): sheet for sheet in SHEETS}
    if name.lower() not in known:
        raise ConfigError(
            f"the device {name!r} is not on file{did_you_mean(name, SHEETS)}",
            f"on file are {', '.join(SHEETS)}; describe others in a cluster file (docs/launch.md)",
        )
    if not int(devices) or not int(nodes or 1):
        raise ConfigError(f"--cluster {cluster} has no devices", "for example 8xH100, or 2x8xH100 for two nodes")
    per_node = int(devices) if nodes or int(devices) < 8 or int(devices) % 8 else 8
    count = int(nodes) if nodes else int(devices) // per_node
    return hardware.cluster_of(known[name.lower()], count, per_node)
