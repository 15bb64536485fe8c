"""A step's counts are those of all its samples, whoever died when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster import fatal
from tests.cluster.runs import Disturb, assert_same, measured, train, worker

pytest.importorskip("msgspec")

# An evaluation brings the reward's module into the rollout worker before its first commit.
OVER: dict[str, Any] = {
    "rewards": {"functions": [{"function": "last_number"}, {"function": "tests.cluster.fatal:reward", "weight": 0.1}]},
    "train": {"steps": 2},
    "eval": {"size": 4},
}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("local")
    train(folder, **OVER, cluster={"executor": "local"})
    return measured(folder)


@pytest.mark.parametrize("victim", ["rollout-0", "reward-0"])
def test_what_a_worker_has_committed_is_counted_though_it_dies_before_another_word(
    tmp_path: Path, local: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    monkeypatch.setenv(fatal.FATAL, victim)
    monkeypatch.setenv(fatal.MARK, str(tmp_path / "died"))
    watch = Disturb(worker(victim), at_step=99)
    train(tmp_path, watch, **OVER)
    assert (tmp_path / "died").exists() and any(f"{victim} is lost" in said for said in watch.said), watch.said
    assert_same(measured(tmp_path), local)
