"""Memory per rank on paper: published models, layouts that fit and layouts that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks._sent import sent

from tidemill import doctor
from tidemill.estimate.ranks_memory import SHORT, RankMemory, parameters_per_rank, per_rank
from tidemill.models import published
from tidemill.models.shape import shape_of
from tidemill.recipe import load as recipe
from tidemill.recipe.config import Config, ModelSettings


@pytest.mark.parametrize(
    ("name", "billions"), [("deepseek-v3-671b", 671), ("qwen3-235b-a22b", 235), ("qwen3-30b-a3b", 30.5)]
)
def test_published_sizes_are_those_of_the_models(name: str, billions: float) -> None:
    assert published.find(name)[1].total / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_folders_own_settings_give_its_sizes(tmp_path: Path) -> None:
    from tests.learn.parallel.products import COMMON, MODELS
    from transformers import AutoModelForCausalLM

    for name in ("dense", "untied", "experts", "latent"):
        kind, own = MODELS[name]
        made = AutoModelForCausalLM.from_config(kind(**{**COMMON, **own}))
        made.config.save_pretrained(tmp_path / name)
        sizes = shape_of(ModelSettings(path=str(tmp_path / name)))
        assert sizes is not None
        # Norms inside attention and routers' biases are not counted.
        assert sizes.total == pytest.approx(sum(p.numel() for p in made.parameters()), rel=0.01), name


@pytest.mark.parametrize("name", ["cluster/deepseek-v3-671b", "cluster/qwen3-235b"])
def test_a_layout_of_384_devices_fits_on_paper(name: str) -> None:
    loaded = recipe.load(name)
    assert loaded.config.learn.parallel.ranks == 384
    found = {f.area: f for f in doctor.examine(loaded)}
    assert found["recipe memory"].status == "ok", found["recipe memory"]
    assert "384 ranks" in found["recipe memory"].what


@pytest.mark.parametrize(
    ("name", "over", "words"),
    [
        ("cluster/deepseek-v3-671b", ["learn.parallel.ep=1"], "ep: no rank then gathers all experts"),
        ("cluster/deepseek-v3-671b", ["learn.parallel.fsdp=64"], "more ranks"),
        ("cluster/deepseek-v3-671b", ["learn.recompute=none"], "learn.recompute=full"),
        ("cluster/qwen3-235b", ["learn.parallel.fsdp=16", "learn.parallel.ep=16"], "more ranks"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_what_would_help(name: str, over: list[str], words: str) -> None:
    found = {f.area: f for f in doctor.examine(recipe.load(name, over))}
    assert found["recipe memory"].status == "bad", found["recipe memory"]
    assert words in found["recipe memory"].remedy
    assert not doctor.is_healthy(list(found.values()))


def test_an_impossible_product_of_a_published_model_is_refused() -> None:
    found = {f.area: f for f in doctor.examine(recipe.load("cluster/qwen3-235b", ["learn.parallel.tp=3"]))}
    assert "64 heads and 4 key/value heads" in found["recipe"].what


def test_every_rank_of_a_product_holds_its_share() -> None:
    def config(**parallel: int) -> Config:
        tiny = {"hidden": 64, "layers": 4, "heads": 8, "kv_heads": 8, "intermediate": 128}
        return Config.model_validate({"model": {"tiny": tiny}, "learn": {"parallel": parallel}})

    shape = shape_of(config().model)
    assert shape is not None
    sizes = shape
    whole = parameters_per_rank(sizes, config().learn.parallel)
    assert whole == pytest.approx(shape.parameters, rel=0.01)
    for parallel in ({"fsdp": 4}, {"tp": 4}, {"fsdp": 2, "tp": 2}, {"fsdp": 2, "cp": 2}):
        assert parameters_per_rank(sizes, config(**parallel).learn.parallel) == pytest.approx(whole / 4, rel=0.01)
    assert parameters_per_rank(sizes, config(replicate=4).learn.parallel) == whole
    assert per_rank(config(fsdp=4), sizes, 128).total < per_rank(config(), sizes, 128).total
    assert sent(config(), sizes, 128).total == 0
    assert sent(config(fsdp=2), sizes, 128).shard == pytest.approx(0.5 * 3 * 4 * whole, rel=0.01)


def test_other_models_on_the_ranks_are_counted() -> None:
    def needed(*over: str) -> RankMemory:
        own = recipe.load({"model": {"tiny": {"hidden": 64, "layers": 4}}, "learn": {"parallel": {"fsdp": 4}}}, over)
        shape = shape_of(own.config.model)
        assert shape is not None
        return per_rank(own.config, shape, 128)

    plain = needed()
    assert plain.reference == plain.critic == 0
    assert needed("algorithm.kl.coef=0.1").reference == plain.weights
    critic = needed("algorithm=ppo", "algorithm.critic.parallel.replicate=4").critic
    assert critic == pytest.approx(4 * (plain.weights + plain.gradients + plain.optimizer), rel=0.01)
    assert needed("learn.lora_rank=2").optimizer < plain.optimizer / 4


def test_samples_are_short_where_the_kernel_for_short_ones_takes_them() -> None:
    from tidemill.models.attention import short

    assert short.LONGEST == SHORT
