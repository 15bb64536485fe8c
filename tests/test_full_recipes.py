"""Recipes of full size: none has been run here, so each must at least be right on paper."""

import functools
import json
import math
import tempfile
from pathlib import Path
from typing import Any

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
    assert found["recipe rollout"].status == "ok", found["recipe rollout"].what
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
    "rollout.cache_tokens": 1024,
    "rewards.workers": 1,
    "train.prompts_per_step": 4,
    "train.samples_per_prompt": 4,
    "train.tokens_per_microbatch": 64,
    "train.steps": 2,
    "eval.size": 4,
    "observe.tensorboard": "false",
    "flow.hand_over": "all",  # as on a device that is full
    "cluster.executor": "processes",
    "learn.parallel.device_gb": "none",
}
FAMILY = {"qwen2.5": "qwen2", "qwen3-8b": "qwen3", "qwen3-": "qwen3_moe", "deepseek": "deepseek_v3"}
MIXTURE = {"model.tiny.experts": 4, "model.tiny.experts_per_token": 2}


def shrunk(name: str) -> dict[str, Any]:
    """A recipe's own settings but for sizes and workers: each size of a product that is more than 1 becomes 2."""
    config = recipe.load(name).config
    family = next(kind for word, kind in FAMILY.items() if name.removeprefix("full/").startswith(word))
    small = {**SMALL, "model.tiny.architecture": family, **(MIXTURE if "moe" in family or "deep" in family else {})}
    for where, sizes in (
        ("learn.parallel", ("replicate", "fsdp", "tp", "cp", "ep", "pp")),
        ("rollout", ("tp", "dp", "pp")),
    ):
        section = config.learn.parallel if where == "learn.parallel" else config.rollout
        small |= {f"{where}.{size}": min(2, getattr(section, size)) for size in sizes}
    ranks = [small[f"learn.parallel.{size}"] for size in ("replicate", "fsdp", "tp", "cp", "pp")]
    return {**small, "cluster.learners": math.prod(ranks)}


@functools.cache  # recipes of one model for several kinds of nodes differ in numbers that shrinking takes away
def trained(settings: tuple[tuple[str, Any], ...], name: str) -> tuple[Path, int]:
    folder = Path(tempfile.mkdtemp(prefix="tidemill-full-"))
    summary = launch.train(name, [*(f"{key}={value}" for key, value in settings), f"folder={folder}"])
    return folder / name.removeprefix("full/"), summary.steps


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_full_recipe_makes_two_steps_shrunk_on_processes(name: str) -> None:
    pytest.importorskip("msgspec")
    small = shrunk(name)
    kind = next(other for other in NAMES if shrunk(other) == small)
    run, steps = trained(tuple(small.items()), kind)
    assert steps == 2
    assert (run / "checkpoints" / "step-000002" / "manifest.json").exists()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    made = [line for line in lines if "loss" in line]
    assert len(made) == 2 and all(line["made_tokens"] > 0 and line["handed_over/state_bytes"] > 0 for line in made)


def test_shrunk_recipes_keep_every_form_of_parallelism_that_theirs_has() -> None:
    kinds = {tuple(shrunk(name).items()) for name in NAMES}
    assert 6 <= len(kinds) <= 8
    deep = shrunk("full/deepseek-v3-671b-h100")
    assert deep["cluster.learners"] == 4 and deep["learn.parallel.ep"] == deep["learn.parallel.pp"] == 2
    assert deep["rollout.tp"] == deep["rollout.dp"] == 2
