"""Recipes of full size: none has been run here, so each must at least be right on paper."""

from dataclasses import replace

import pytest

from tidemill import doctor, recipe
from tidemill.settings import published

NAMES = [name for name, _ in recipe.listing() if name.startswith("full/")]
DEVICES = {"a2": (8, 64), "a3": (16, 64), "h100": (8, 80), "h200": (8, 141)}  # of a node, and their gigabytes


def test_every_model_is_there_for_every_kind_of_node() -> None:
    models = ("qwen2.5-7b", "qwen2.5-32b", "qwen3-8b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3-671b")
    assert set(NAMES) == {f"full/{model}-{node}" for model in models for node in DEVICES}


@pytest.mark.parametrize("name", NAMES)
def test_a_full_recipe_is_valid_and_fits_its_devices_by_estimate(name: str) -> None:
    loaded = recipe.load(name)
    # As they stand no executor starts them (docs/recipes.md); all the rest must be right.
    alone = loaded.config.cluster.model_copy(update={"executor": "local"})
    found = {
        f.area: f for f in doctor.examine(replace(loaded, config=loaded.config.model_copy(update={"cluster": alone})))
    }
    assert found["recipe"].status == "ok", found["recipe"].what
    assert found["recipe memory"].status == "ok", found["recipe memory"].what
    per_node, gigabytes = DEVICES[name.rpartition("-")[2]]
    parallel = loaded.config.learn.parallel
    assert parallel.ranks == loaded.config.cluster.learners and parallel.ranks % per_node == 0
    assert parallel.device_gb == gigabytes
    nodes = parallel.ranks // per_node
    assert f"on {nodes} node{'s' if nodes > 1 else ''} of" in loaded.config.about
    assert "not run" in loaded.config.about


@pytest.mark.parametrize(("name", "billions"), [("qwen2.5-7b", 7.62), ("qwen2.5-32b", 32.8), ("qwen3-8b", 8.19)])
def test_published_sizes_of_dense_models_are_theirs(name: str, billions: float) -> None:
    assert published.sizes(published.MODELS[name]).total / 1e9 == pytest.approx(billions, rel=0.005)
