"""Every algorithm by name."""

from __future__ import annotations

from tidemill.algorithms.api import Algorithm
from tidemill.algorithms.cispo import CISPO
from tidemill.algorithms.dapo import DAPO
from tidemill.algorithms.distill import Distill
from tidemill.algorithms.dpo import DPO
from tidemill.algorithms.dr_grpo import DrGRPO
from tidemill.algorithms.grpo import GRPO
from tidemill.algorithms.gspo import GSPO
from tidemill.algorithms.ipo import IPO
from tidemill.algorithms.kto import KTO
from tidemill.algorithms.orpo import ORPO
from tidemill.algorithms.ppo import PPO
from tidemill.algorithms.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from tidemill.algorithms.rejection import Rejection
from tidemill.algorithms.remax import ReMax
from tidemill.algorithms.reward_model import RewardModel
from tidemill.algorithms.rloo import RLOO
from tidemill.algorithms.sft import SFT
from tidemill.algorithms.simpo import SimPO
from tidemill.errors import ConfigError, did_you_mean
from tidemill.imports import is_import_path, load

ONLINE: tuple[Algorithm, ...] = (
    *(GRPO(), DrGRPO(), DAPO(), GSPO(), CISPO(), RLOO(), ReinforcePP(), ReinforcePPBaseline(), ReMax(), PPO()),
    *(Distill(), Rejection()),
)
OFFLINE: tuple[Algorithm, ...] = (SFT(), DPO(), IPO(), KTO(), ORPO(), SimPO(), RewardModel())
ALGORITHMS: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in (*ONLINE, *OFFLINE)}


def get(name: str) -> Algorithm:
    """An algorithm by its name, or a user's own by import path (an object or a class)."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if is_import_path(name):
        found = load(name, ConfigError, "algorithm.name")
        algorithm: Algorithm = found() if isinstance(found, type) else found
        return algorithm
    raise ConfigError(
        f"algorithm.name: there is no algorithm {name!r}{did_you_mean(name, ALGORITHMS)}",
        f"the algorithms are {', '.join(ALGORITHMS)}; your own is package.module:name",
    )
