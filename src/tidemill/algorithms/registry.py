"""Every algorithm by name."""

from __future__ import annotations

from tidemill.algorithms.api import Algorithm
from tidemill.algorithms.grpo import GRPO
from tidemill.algorithms.sft import SFT
from tidemill.errors import ConfigError, did_you_mean
from tidemill.imports import is_import_path, load

ALGORITHMS: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in (GRPO(), SFT())}


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
