"""Recipes of full size: none has been run here, so each must at least be right on paper."""

from pathlib import Path

import pytest

from tests.faults.test_resume import RECIPE
from tidemill import doctor
from tidemill.check import precheck
from tidemill.models import published
from tidemill.recipe import load as recipe
from tidemill.run import start as launch

NAMES = [name for name, _ in recipe.listing() if name.startswith("full/")]
DEVICES = {"a2": (8, 64), "a3": (16, 64), "h100": (8, 80), "h200": (8, 141)}  # of a node, and their gigabytes


def test_every_model_is_there_for_every_kind_of_node() -> None:
    models = ("qwen2.5-7b", "qwen2.5-32b", "qwen3-8b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3-671b")
    assert set(NAMES) == {f"full/{model}-{node}" for model in models for node in DEVICES}


@pytest.mark.parametrize("name", NAMES)
def test_a_full_recipe_is_valid_and_fits_its_devices_by_estimate(name: str) -> None:
    loaded = recipe.load(name)
    found = {f.area: f for f in doctor.examine(loaded)}
    assert found["recipe"].status == "ok", found["recipe"].what
    assert found["recipe memory"].status == "ok", found["recipe memory"].what
    # An engine may be shared by as many devices as the model has key/value heads; latent attention is not shared.
    has_room = not name.startswith(("full/qwen3-235b", "full/deepseek"))
    assert found["recipe rollout"].status == ("ok" if has_room else "warn"), found["recipe rollout"].what
    per_node, gigabytes = DEVICES[name.rpartition("-")[2]]
    parallel = loaded.config.learn.parallel
    assert parallel.ranks == loaded.config.cluster.learners and parallel.ranks % per_node == 0
    assert parallel.device_gb == gigabytes
    nodes = parallel.ranks // per_node
    assert f"on {nodes} node{'s' if nodes > 1 else ''} of" in loaded.config.about
    assert "not run" in loaded.config.about


@pytest.mark.parametrize(("name", "billions"), [("qwen2.5-7b", 7.62), ("qwen2.5-32b", 32.8), ("qwen3-8b", 8.19)])
def test_published_sizes_of_dense_models_are_theirs(name: str, billions: float) -> None:
    assert published.find(name)[1].total / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_the_missing_model_keeps_a_full_recipe_from_starting(name: str) -> None:
    config = recipe.load(name).config
    problems = precheck.problems(config, config.model)
    assert len(problems) == 1 and problems[0].startswith(f"model.path={config.model.path} does not exist"), problems


SMALL = {
    "device": "cpu",
    "threads": 1,
    "model.path": "none",
    "model.dtype": "float32",
    **{f"model.tiny.{key}": value for key, value in RECIPE["model"]["tiny"].items()},
    "data.args": "{level: [1, 1]}",
    "data.max_prompt_tokens": 24,
    "rollout.max_new_tokens": 8,
    "rollout.concurrent": 16,
    "rewards.workers": 1,
    "train.prompts_per_step": 4,
    "train.samples_per_prompt": 4,
    "train.tokens_per_microbatch": 64,
    "train.steps": 2,
    "eval.size": 4,
    "observe.tensorboard": "false",
    "cluster.executor": "processes",
    "cluster.learners": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tp"), [("qwen3-8b-h100", 1), ("qwen2.5-32b-h100", 2)])
def test_a_full_recipe_trains_with_a_small_model_on_fewer_ranks(tmp_path: Path, name: str, tp: int) -> None:
    """All its own settings but sizes, ranks, and workers in place of Ray's."""
    pytest.importorskip("msgspec")
    over = [f"{key}={value}" for key, value in SMALL.items()]
    ranks = ["learn.parallel.fsdp=2", f"rollout.tp={tp}"]
    summary = launch.train(f"full/{name}", [*over, *ranks, f"folder={tmp_path}"])
    assert summary.steps == 2
    assert (tmp_path / name / "checkpoints" / "step-000002" / "manifest.json").exists()
