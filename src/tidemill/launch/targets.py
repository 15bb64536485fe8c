"""The table of targets."""

from __future__ import annotations

from tidemill.errors import ConfigError, did_you_mean
from tidemill.launch.dstack import Dstack
from tidemill.launch.kuberay import KubeRay
from tidemill.launch.local import Local
from tidemill.launch.modelarts import ModelArts
from tidemill.launch.ray_jobs import RayJobs
from tidemill.launch.skypilot import SkyPilot
from tidemill.launch.slurm import Slurm
from tidemill.launch.ssh import Ssh
from tidemill.launch.target import Target

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
