"""Who a network plays against, and how."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tidemill.models.spaces import Spaces
from tidemill.recipe.config import Config
from tidemill.rollout.control.opponents import ITSELF, Opponents


class Player:
    """Draws column 10 · noise."""

    spaces = Spaces(observation=(13,), choices=(10,), masked=True)

    def act(self, seen: Any, noise: Any, *_: Any) -> Any:
        return SimpleNamespace(actions=(10 * noise).astype(np.int64))


def answers(slips: float, chance: list[float], folder: Path) -> list[int]:
    """Columns 4 and 6 alone are legal, which the player does not care about."""
    config = Config.model_validate({"environment": {"name": "connect_four", "players": 2, "league": {"slips": slips}}})
    seen = np.zeros((len(chance), 13), np.float32)
    seen[:, [3 + 4, 3 + 6]] = 1.0
    opponents = Opponents(Player(), config, folder, "0")
    return [int(move) for move in opponents.answer(ITSELF, seen, np.array(chance))]


def test_by_itself_an_opponent_draws_all_its_moves(tmp_path: Path) -> None:
    assert answers(0.0, [0.0, 0.25, 0.55, 0.95], tmp_path) == [0, 2, 5, 9]


def test_a_share_of_an_opponents_moves_are_any_legal_ones_and_the_rest_is_drawn_evenly(tmp_path: Path) -> None:
    assert answers(0.5, [0.0, 0.24, 0.25, 0.49, 0.5, 0.625, 0.775, 0.99], tmp_path) == [4, 4, 6, 6, 0, 2, 5, 9]


def test_all_moves_may_be_slips(tmp_path: Path) -> None:
    assert answers(1.0, [0.0, 0.3, 0.999], tmp_path) == [4, 4, 6]


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_lies_between_none_and_all(share: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="slips"):
        answers(share, [0.5], tmp_path)
