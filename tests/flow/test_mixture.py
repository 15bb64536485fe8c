"""A run of a mixture of experts: rollout's routes reach the learner, and loads are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.faults.test_resume import RECIPE, numbers

from tidemill import launch
from tidemill.errors import TidemillError


def run(folder: Path, schedule: str, **over: Any) -> list[dict[str, Any]]:
    tiny = {**RECIPE["model"]["tiny"], "architecture": "qwen3_moe", "experts": 4, "intermediate": 24}
    train = {**RECIPE["train"], "steps": 2, "updates_per_step": 1}
    moe = {"replay": True, "balance": "bias", **over}
    recipe = {**RECIPE, "folder": str(folder), "model": {"tiny": tiny}, "train": train, "flow": {"schedule": schedule}}
    launch.train({**recipe, "learn": {"lr": 1e-2, "moe": moe}, "algorithm": {"old_logprobs": "recompute"}})
    return [line for line in numbers(folder / "small") if "loss" in line]


@pytest.mark.parametrize("schedule", ["sync", "streamed"])
def test_a_run_replays_its_own_routes(tmp_path: Path, schedule: str) -> None:
    lines = run(tmp_path, schedule)
    assert len(lines) == 2
    for line in lines:
        assert line["moe_replay_agreement"] > 0.99  # one update per step: rollout's weights are the learner's
        assert line["ratio_max"] == pytest.approx(1, abs=1e-4)
        assert 1 <= line["moe_busiest"] <= 2 and line["moe_idle_share"] <= 0.5  # 2 of 4 experts


def test_a_bias_wants_a_rollout_that_shares_the_model(tmp_path: Path) -> None:
    learn = {"moe": {"balance": "bias"}, "parallel": {"fsdp": 2}}
    with pytest.raises(TidemillError, match=r"learn\.moe\.balance is bias"):
        launch.train({**RECIPE, "folder": str(tmp_path), "learn": learn})


def test_replay_wants_an_engine_that_records(tmp_path: Path) -> None:
    with pytest.raises(TidemillError, match=r"learn\.moe\.replay is true, but rollout\.engine hf"):
        launch.train(
            {**RECIPE, "folder": str(tmp_path), "learn": {"moe": {"replay": True}}, "rollout": {"engine": "hf"}}
        )
