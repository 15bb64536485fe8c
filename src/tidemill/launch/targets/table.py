"""The table of targets."""

from __future__ import annotations

from tidemill.errors import ConfigError, did_you_mean
from tidemill.launch.target import Target
from tidemill.launch.targets.dstack import Dstack
from tidemill.launch.targets.kuberay import KubeRay
from tidemill.launch.targets.local import Local
from tidemill.launch.targets.modelarts import ModelArts
from tidemill.launch.targets.ray_jobs import RayJobs
from tidemill.launch.targets.skypilot import SkyPilot
from tidemill.launch.targets.slurm import Slurm
from tidemill.launch.targets.ssh import Ssh

TARGETS: dict[str, Target] = {
    "local": Local(),
    "ssh": Ssh(),
    "slurm": Slurm(),
    "ray": RayJobs(),
    "kuberay": KubeRay(),
    "modelarts": ModelArts(),
    "skypilot": SkyPilot(),
    "dstack": Dstack(),
}


def find(where: str) -> Target:
    if where not in TARGETS:
        raise ConfigError(f"--on {where}: no such place{did_you_mean(where, TARGETS)}", f"places: {', '.join(TARGETS)}")
    return TARGETS[where]
