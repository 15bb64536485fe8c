"""A run of a mixture of experts: rollout's routes reach the learner, and loads are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.test_resume import RECIPE, numbers
from tests.learn.parallel.models import model
from transformers import AutoModelForCausalLM

from tidemill.errors import ConfigError, TidemillError
from tidemill.learn import checkpoint
from tidemill.models.load import save_folder
from tidemill.models.mixture import routing
from tidemill.models.tiny import make_tokenizer
from tidemill.recipe.config import TinyModel
from tidemill.run import start as launch
from tidemill.run import trained


def run(folder: Path, schedule: str, **over: Any) -> list[dict[str, Any]]:
    tiny = {**RECIPE["model"]["tiny"], "architecture": "qwen3_moe", "experts": 4, "intermediate": 24}
    learn = {"lr": 1e-2, **over.pop("learn", {})}
    train = {**RECIPE["train"], "steps": over.pop("steps", 2), "updates_per_step": 1}
    moe = {"replay": True, "balance": "bias", **over}
    recipe = {**RECIPE, "folder": str(folder), "model": {"tiny": tiny}, "train": train, "flow": {"schedule": schedule}}
    launch.train({**recipe, "learn": {**learn, "moe": moe}, "algorithm": {"old_logprobs": "recompute"}})
    return [line for line in numbers(folder / "small") if "loss" in line]


@pytest.mark.parametrize("schedule", ["sync", "streamed"])
def test_a_run_replays_its_own_routes(tmp_path: Path, schedule: str) -> None:
    lines = run(tmp_path, schedule)
    assert len(lines) == 2
    for line in lines:
        assert line["moe_replay_agreement"] > 0.99  # one update per step: rollout's weights are the learner's
        assert line["ratio_max"] == pytest.approx(1, abs=1e-4)
        assert 1 <= line["moe_busiest"] <= 2 and line["moe_idle_share"] <= 0.5  # 2 of 4 experts


def test_what_is_opened_chooses_with_the_bias_and_an_export_without_a_place_for_it_is_refused(tmp_path: Path) -> None:
    run(tmp_path, "sync", bias_rate=0.3, steps=3)
    folder = tmp_path / "small"
    tensors, _ = checkpoint.load(checkpoint.latest(folder / "checkpoints").path)
    opened = trained.open_trained(folder, "cpu").loaded.model
    biases = routing.given(opened)
    assert len(biases) == 2 and all(torch.equal(tensors[f"model.{name}"], bias) for name, bias in biases.items())
    after = [line for line in numbers(folder) if "eval/reward" in line][-1]
    found = launch.evaluate(folder)
    assert found.metrics()["eval/reward"] == after["eval/reward"]
    with pytest.raises(ConfigError, match="Qwen3MoeForCausalLM has no place") as refused:
        trained.export(folder, tmp_path / "model")
    assert "--without-bias" in (refused.value.remedy or "")
    trained.export(folder, tmp_path / "model", without_bias=True)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"]


@pytest.mark.parametrize("balance", ["none", "bias"])
def test_the_bias_of_a_model_that_has_a_place_for_it_is_learned_kept_and_exported(tmp_path: Path, balance: str) -> None:
    made = model("deepseek-v3", num_hidden_layers=2)
    for layer in made.get_decoder().layers:
        layer.mlp.gate.e_score_correction_bias.copy_(torch.linspace(-0.1, 0.1, 8))
    save_folder(made, make_tokenizer(TinyModel(alphabet="0123456789+-= ")), tmp_path / "base")
    moe, train = {"balance": balance, "bias_rate": 0.3}, {**RECIPE["train"], "steps": 1, "updates_per_step": 1}
    recipe = {**RECIPE, "folder": str(tmp_path), "model": {"path": str(tmp_path / "base")}, "train": train}
    launch.train({**recipe, "learn": {"lr": 1e-3, "moe": moe}})
    trained.export(tmp_path / "small", tmp_path / "model")
    told = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tensors, _ = checkpoint.load(checkpoint.latest(tmp_path / "small" / "checkpoints").path)
    for i, layer in enumerate(told.get_decoder().layers):
        found = layer.mlp.gate.e_score_correction_bias
        assert torch.equal(found, tensors[f"model.model.layers.{i}.mlp.gate.e_score_correction_bias"])
        moved = (found - torch.linspace(-0.1, 0.1, 8)).abs().max()
        assert moved == 0 if balance == "none" else moved > 0.2


@pytest.mark.slow
def test_a_bias_on_ranks_is_that_of_one_rank_and_reaches_their_rollout(tmp_path: Path) -> None:
    one, many = (
        run(tmp_path / str(fsdp), "sync", learn={"parallel": {"fsdp": fsdp}}, bias_rate=0.3, steps=3) for fsdp in (1, 2)
    )
    for a, b in zip(one, many, strict=True):
        for name in ("reward", "loss", "grad_norm", "moe_busiest", "moe_replay_agreement", "ratio_max"):
            assert b[name] == pytest.approx(a[name], abs=1e-4), name
    kept = [routing.given(trained.open_trained(tmp_path / str(n) / "small", "cpu").loaded.model) for n in (1, 2)]
    assert kept[0].keys() == kept[1].keys() and all(torch.equal(kept[0][n], kept[1][n]) for n in kept[0])


def test_replay_wants_an_engine_that_records(tmp_path: Path) -> None:
    with pytest.raises(TidemillError, match=r"learn\.moe\.replay is true, but rollout\.engine hf"):
        launch.train(
            {**RECIPE, "folder": str(tmp_path), "learn": {"moe": {"replay": True}}, "rollout": {"engine": "hf"}}
        )
