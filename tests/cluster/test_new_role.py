"""A new role is one entry in a table and one stage, on every executor; docs/extending.md shows the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.runs import measured, train

pytest.importorskip("msgspec")
SAFE = {"algorithm": {"name": "tests.cluster.safety:SafeGRPO"}, "train": {"steps": 2}, "eval": {"size": 0}}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("local")
    train(folder, **SAFE, cluster={"executor": "local"})
    return measured(folder)


@pytest.mark.parametrize("executor", ["processes", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_safety_scorer_has_a_worker_of_its_own_and_changes_the_same_numbers(
    tmp_path: Path, local: list[dict[str, Any]], executor: str
) -> None:
    if executor == "ray":
        pytest.importorskip("ray")
    train(tmp_path, **SAFE, cluster={"executor": executor})
    assert measured(tmp_path) == local
    assert all(0 < line["safety"] <= 1 for line in local if "loss" in line)
    assert (tmp_path / "small" / "logs" / "safety-0.log").exists()


def test_the_docs_show_the_role_that_is_tested() -> None:
    here = Path(__file__).parent
    docs = (here.parents[1] / "docs" / "extending.md").read_text()
    assert (here / "safety.py").read_text() in docs
