"""The table of definitions in docs/algorithms.md: every cell of settings is one that a recipe may have."""

import re
from pathlib import Path

import pytest
import yaml

from tidemill.algorithms.shared.registry import get
from tidemill.recipe.config import Config

TABLE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
CELLS = re.findall(r"^\| ([^|]+) \| `(\{name: [^`]+\})` \|", TABLE, re.MULTILINE)


@pytest.mark.parametrize("settings", [cell for _, cell in CELLS], ids=[system for system, _ in CELLS])
def test_settings_that_reproduce_another_system_are_valid(settings: str) -> None:
    config = Config(algorithm=yaml.safe_load(settings))
    assert get(config.algorithm.name).graph(config).stages


def test_every_system_is_in_the_table() -> None:
    for system in ("TRL", "verl", "NeMo-RL", "OpenRLHF", "slime", "AReaL", "MindSpeed RL"):
        assert any(system in named for named, _ in CELLS)
