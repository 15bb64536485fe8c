import importlib.util
import json
from importlib import metadata
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tidemill import doctor
from tidemill.device import hints
from tidemill.estimate import ranks_memory
from tidemill.models.shape import shape_of
from tidemill.recipe import load as recipe
from tidemill.rollout.native.ranks.grid import Grid

FITTING = ["data.max_prompt_tokens=64", "rollout.max_new_tokens=64", "device=cpu"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def by_area(found: list[doctor.Finding]) -> dict[str, doctor.Finding]:
    return {f.area: f for f in found}


def test_this_machine_is_described_and_healthy():
    found = doctor.examine()
    areas = by_area(found)
    assert {"processor", "memory", "disk", "python", "torch", "transformers", "device=cpu", "[cluster]"} <= areas.keys()
    assert doctor.is_healthy(found)
    assert "GB free of" in areas["memory"].what


def test_everything_that_is_not_well_has_a_remedy(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(metadata, "version", lambda name: "1.0" if name != "rich" else _missing(name))
    found = doctor.examine()
    assert all(f.remedy for f in found if f.status != "ok")
    areas = by_area(found)
    assert areas["torch"].what == "1.0, older than 2.11"
    assert areas["rich"].status == "bad"
    assert areas["[plot]"].remedy == "pip install 'tidemill[plot]'"
    assert not doctor.is_healthy(found)


def _missing(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(("version", "least", "old"), [("2.13.0+cpu", "2.11", False), ("2.9.1", "2.11", True)])
def test_versions_are_compared_as_numbers(version, least, old):
    assert (doctor._parts(version) < doctor._parts(least)) is old


def test_a_torch_that_does_not_work_is_a_finding_not_a_crash(monkeypatch):
    def broken() -> None:
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(doctor.device, "available", broken)
    found = by_area(doctor.examine())
    assert "libcudart.so.12" in found["device"].what
    assert found["device"].status == "bad"


def test_hardware_that_torch_does_not_use_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr(hints, "_seen", lambda tool, node: f"{node} is there")
    assert [seen for seen, _ in hints.unused({"cpu"})] == ["/dev/nvidia0 is there", "/dev/davinci0 is there"]
    assert [seen for seen, _ in hints.unused({"cpu", "cuda"})] == ["/dev/davinci0 is there"]


def test_a_recipe_is_told_its_memory_next_to_what_is_free():
    several_passes = "train.tokens_per_microbatch=2048"  # gradients of the ones before are there at the peak
    found = by_area(doctor.examine(recipe.load({}, [*FITTING, several_passes])))
    assert "settings are valid" in found["recipe"].what
    memory = found["recipe memory"]
    assert memory.status == "ok"
    for part in ("weights", "gradients", "optimizer", "activations", "cache", "is free on cpu"):
        assert part in memory.what


def test_a_recipe_that_cannot_work_is_bad():
    found = by_area(doctor.examine(recipe.load({}, [*FITTING, "train.updates_per_step=3"])))
    assert found["recipe"].status == "bad"
    assert "does not divide" in found["recipe"].what


def test_a_recipe_that_does_not_fit_is_told_what_would_help(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    shape = {"hidden_size": 16384, "num_hidden_layers": 100, "num_attention_heads": 128, "vocab_size": 150_000}
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"w": torch.zeros(4)}, folder / "model.safetensors")
    found = by_area(doctor.examine(recipe.load({}, [*FITTING, f"model.path={folder}"])))
    assert found["recipe memory"].status == "bad"
    assert "learn.recompute=full" in found["recipe memory"].remedy


def test_an_engine_over_several_devices_is_judged_by_its_share() -> None:
    pytest.importorskip("msgspec")
    over = [*FITTING, "cluster.executor=processes", "rollout.tp=2", "model.tiny.hidden=256"]
    alone = doctor.examine(recipe.load("quickstart", ["model.warm_start=none", *over]))
    found = {f.area: f for f in alone}["recipe rollout"]
    assert found.status == "ok" and "a share of an engine of tp 2" in found.what
    settings = recipe.load("quickstart", ["model.warm_start=none", *over]).config
    shape = shape_of(settings.model)
    assert shape is not None
    sizes = shape
    (whole, token), (half, less) = (ranks_memory.engine_share(settings, sizes, Grid(tp=tp)) for tp in (1, 2))
    assert whole == sizes.total * 4 and less == token // 2
    assert half == (sizes.total + sizes.embedding + sizes.hidden) * 2


@pytest.mark.parametrize(
    ("address", "here", "is_told"),
    [
        ("auto", ("cpu", 0), True),  # no cluster runs here
        ("local", ("cuda", 4), True),
        ("local", ("cuda", 8), False),
        ("head:6379", ("cpu", 0), False),  # whose devices are not here
    ],
)
def test_a_recipe_for_devices_that_are_not_here_is_said_not_to_work_here(monkeypatch, address, here, is_told):
    monkeypatch.setattr(doctor.device, "count", lambda: here)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(doctor, "CURRENT_CLUSTER", Path("/none"))
    found = by_area(doctor.examine(recipe.load("full/qwen3-8b-h100", [f"cluster.address={address}"])))
    assert ("recipe devices" in found) == is_told
    if is_told:
        assert found["recipe devices"].status == "bad" and "it cannot work here" in found["recipe devices"].what
        assert not doctor.is_healthy(list(found.values()))
