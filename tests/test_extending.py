"""docs/extending.md: a new algorithm is one file, a new model family is one file. Each diff shown there is run here."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import tidemill
from tidemill import algorithms
from tidemill.algorithms.shared import registry
from tidemill.check import parallel, precheck, rules
from tidemill.estimate.memory import memory
from tidemill.models import families
from tidemill.models.load import load
from tidemill.models.shape import shape_of
from tidemill.recipe import load as recipe
from tidemill.recipe.config import ModelSettings
from tidemill.rollout.native.forward import lean
from tidemill.rollout.native.ranks.grid import Grid

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
SMALL = {
    "device": "cpu",
    "threads": 1,
    "model": {"tiny": {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 48, "window": 48}},
    "data": {"source": "arithmetic", "max_prompt_tokens": 24},
    "rollout": {"max_new_tokens": 8},
    "train": {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 4},
    "eval": {"size": 0},
    "observe": {"tensorboard": False},
}


def shown(path: str) -> str:
    """The file that a diff of the page adds."""
    found = re.search(rf"```diff\n\+\+\+ {re.escape(path)}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None, path
    return "".join(line[1:] + "\n" for line in found[1].splitlines())


def trained(tmp_path: Path, *overrides: str) -> dict[str, float]:
    """Metrics of a step."""
    tidemill.train(SMALL, [f"folder={tmp_path}", "name=run", *overrides])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return next(m for m in map(json.loads, lines) if "loss" in m)


@pytest.fixture
def algorithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's algorithm, as a file beside the others."""
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "log_reward.py").write_text(shown("src/tidemill/algorithms/log_reward.py"), encoding="utf-8")
    monkeypatch.setattr(algorithms, "__path__", [*algorithms.__path__, str(folder)])
    registry.every.cache_clear()
    yield "log_reward"
    registry.every.cache_clear()
    sys.modules.pop("tidemill.algorithms.log_reward", None)


def test_a_new_algorithm_is_one_file(algorithm: str, tmp_path: Path) -> None:
    assert algorithm in registry.names()
    metrics = trained(tmp_path, f"algorithm={algorithm}")
    assert metrics["loss"] != 0 or metrics["reward"] == 0
    config = recipe.load(SMALL, [f"algorithm={algorithm}"]).config
    assert config.algorithm.aggregation == "token_mean"  # as its file says
    refused = recipe.load(SMALL, [f"algorithm.name={algorithm}", "algorithm.std_eps=1"]).config
    assert any("algorithm.std_eps is 1" in p for p in precheck.problems(refused, refused.model))


def test_a_new_algorithm_works_from_a_users_own_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(shown("src/tidemill/algorithms/log_reward.py"), encoding="utf-8")
    trained(tmp_path, "algorithm=mine.py:LogReward")


CRITICAL = """
from tidemill.algorithms.ppo import PPO


class Mine(PPO):
    name, about = "mine", "PPO with a reference whatever kl.coef is"

    def graph(self, config):
        from tidemill.algorithms.shared import tables
        from tidemill.graph import Graph

        usual = super().graph(config)
        return Graph(self.name, usual.source, (*usual.stages[:1], tables.reference(), *usual.stages[1:]))
"""


def test_a_users_own_algorithm_is_estimated_and_checked_by_its_table(tmp_path: Path) -> None:
    """No list of names decides who has a critic or a reference."""
    (tmp_path / "own.py").write_text(CRITICAL, encoding="utf-8")
    mine = f"{tmp_path / 'own.py'}:Mine"

    def needed(name: str, *more: str) -> dict[str, int]:
        config = recipe.load(SMALL, [f"algorithm.name={name}", *more]).config
        shape = shape_of(config.model)
        assert shape is not None
        found = memory(config, shape)
        assert found is not None
        return dict(found.parts())

    assert needed(mine)["critic"] == needed("ppo")["critic"] > 0
    assert needed("ppo")["reference"] == 0
    assert needed(mine)["reference"] == needed("grpo", "algorithm.kl.coef=1")["reference"] > 0
    cut = recipe.load(SMALL, [f"algorithm.name={mine}", "learn.parallel.fsdp=2", "algorithm.critic.trunk=shared"])
    assert any("algorithm.critic.trunk is shared" in problem for problem in rules.problems(cut.config))


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's family, as a file beside the others."""
    folder = tmp_path / "families"
    folder.mkdir()
    (folder / "seed_oss.py").write_text(shown("src/tidemill/models/families/seed_oss.py"), encoding="utf-8")
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(folder)])
    yield "seed_oss"
    sys.modules.pop("tidemill.models.families.seed_oss", None)


def test_a_new_model_family_is_one_file(family: str, tmp_path: Path) -> None:
    """Made small on the spot, estimated to the parameter, checked, trained."""
    tiny = {**SMALL["model"]["tiny"], "architecture": family}
    model = ModelSettings.model_validate({"tiny": tiny})
    made = load(model, seed=0, device=torch.device("cpu"))
    shape = shape_of(model)
    assert shape is not None and shape.parameters == made.parameters
    assert lean.supports(made.model)  # its rollout has the lean forward pass
    assert list(parallel.engine_problems(Grid(tp=2), shape)) == []  # and engines over several ranks
    metrics = trained(tmp_path, f"model.tiny.architecture={family}", "algorithm.old_logprobs=recompute")
    assert metrics["gap_max"] < 1e-4  # which give the learner's log-probabilities


def test_a_family_without_a_file_is_refused_by_name_where_a_small_model_is_made() -> None:
    config = recipe.load(SMALL, ["model.tiny.architecture=qwen33"]).config
    assert any("did you mean qwen3" in problem for problem in precheck.problems(config, config.model))
