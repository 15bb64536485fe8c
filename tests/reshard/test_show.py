import json

import pytest

from tidemill.errors import ReshardError
from tidemill.estimate.weight_flow import published
from tidemill.reshard import show


def test_a_dry_plan_of_a_published_model_needs_no_devices():
    found = show.dry_plan(published("Qwen/Qwen2.5-32B"), "tp8,dp2", "tp4,dp4", devices=16)
    assert found.parameters == pytest.approx(32.76e9, rel=1e-3)
    assert found.bytes == found.lower_bound_bytes
    assert found.by_distance["other node"] == 0
    assert found.most_in_bytes < found.model_bytes / 3.9
    assert found.peak_extra_bytes < found.gather_peak_extra_bytes / 100
    assert found.lower_bound_seconds["25"] == pytest.approx(2 * found.lower_bound_seconds["50"])
    json.dumps(found.as_dict())


def test_the_text_says_bytes_peak_lower_bound_and_who_sends_to_whom():
    text = show.render(show.dry_plan(published("tiny"), "fsdp4", "tp2,dp2", per_node=2))
    for word in ("on the wire", "other node", "extra memory", "no plan is faster", "gathering everything", "rows send"):
        assert word in text
    rows = [line for line in text.splitlines() if "│" in line]
    assert len(rows) == 4
    assert all("█" in line or "▓" in line or "▒" in line for line in rows)


def test_many_ranks_are_drawn_in_groups_of_whole_nodes():
    text = show.dry_plan(published("tiny"), "dp64", "tp4,dp16", per_node=8, apart=True).picture
    assert len([line for line in text.splitlines() if "│" in line]) == 16
    assert "8 ranks" in text


def test_nothing_moves_between_equal_layouts():
    assert show.dry_plan(published("tiny"), "dp2", "dp2").picture == "nothing moves"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": "qwen2.5-33b"}, "did you mean qwen2.5-32b"),
        ({"source": "tp8,pd2"}, "did you mean"),
        ({"devices": 32}, "tp8,dp2 makes 16"),
    ],
)
def test_what_cannot_be_planned_is_said_in_words(arguments, words):
    usual = {"source": "tp8,dp2", "target": "tp4,dp4", "devices": 16}
    with pytest.raises(ReshardError, match=words):
        show.dry_plan(published(arguments.pop("model", "qwen2.5-32b")), **{**usual, **arguments})


def test_every_model_on_file_has_shapes():
    from tidemill.models.published import names

    assert all(published(name).shapes for name in names())


def test_a_recipe_says_its_layouts(tmp_path):
    from tidemill.estimate import weight_flow
    from tidemill.recipe import load as recipes

    config = recipes.load(
        {},
        [
            *("learn.parallel.replicate=2", "learn.parallel.fsdp=2", "learn.parallel.cp=2", "learn.parallel.tp=2"),
            *("cluster.executor=processes", "cluster.rollouts=3"),
        ],
    ).config
    assert str(weight_flow.learner_of(config)) == "dp2·fsdp4·tp2"
    engine, is_apart = weight_flow.engine_of(config)
    assert (engine.dp, engine.size, is_apart) == (3, 3, True)
    shapes = weight_flow.model_of(config.model)
    found = show.planned(shapes, weight_flow.learner_of(config), engine, apart=is_apart)
    assert found.devices == 19 and found.bytes == found.lower_bound_bytes == 3 * found.model_bytes


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_a_small_model_and_its_folder_are_planned_with_the_tensors_they_have(tmp_path, architecture):
    import torch

    from tidemill.estimate import weight_flow
    from tidemill.models.load import make_tiny, save_folder
    from tidemill.recipe.config import ModelSettings, TinyModel

    tiny = TinyModel(architecture=architecture, hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48)
    made = make_tiny(tiny, torch.float32, 0, torch.device("cpu"))
    own = {name: tuple(p.shape) for name, p in made.model.named_parameters()}
    assert weight_flow.model_of(ModelSettings(tiny=tiny)).shapes == own
    save_folder(made.model, made.tokenizer, tmp_path / "saved")
    found = weight_flow.model_of(ModelSettings(path=str(tmp_path / "saved")))
    assert found.shapes == own and (found.heads, found.kv_heads, found.tied) == (4, 2, True)


def test_a_published_model_is_planned_before_its_folder_is_here():
    from tidemill.estimate import weight_flow
    from tidemill.recipe import load as recipes

    config = recipes.load("full/qwen2.5-32b-h100").config
    found = weight_flow.model_of(config.model)
    assert found.shapes == weight_flow.published("qwen2.5-32b").shapes and found.dtype == config.model.dtype
    with pytest.raises(ReshardError, match="not there yet"):
        weight_flow.model_of(config.model.model_copy(update={"path": "org/nobody-knows-it"}))


def test_experts_of_a_folder_are_stacked():
    from tidemill.estimate.weight_flow import stacked

    loose = {f"model.layers.0.mlp.experts.{i}.up_proj.weight": (6, 4) for i in range(3)} | {"model.norm.weight": (4,)}
    assert stacked(loose, 3) == {"model.layers.0.mlp.experts.up_proj.weight": (3, 6, 4), "model.norm.weight": (4,)}
