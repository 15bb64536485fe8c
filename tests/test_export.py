"""An exported run is an ordinary Hugging Face folder: transformers opens it, with the same weights and its cache on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tests.faults.test_resume import RECIPE
from tidemill.cli import app
from tidemill.errors import ConfigError
from tidemill.learn import checkpoint
from tidemill.models.load import make_tiny, save_folder
from tidemill.recipe.config import TinyModel
from tidemill.run import start as launch
from tidemill.run.trained import export, export_adapter, open_trained


def test_an_exported_run_opens_with_transformers_and_generates_with_a_cache(tmp_path: Path) -> None:
    launch.train({**RECIPE, "folder": str(tmp_path), "train": {**RECIPE["train"], "steps": 1}})
    export(tmp_path / "small", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.use_cache and model.generation_config.use_cache is not False
    trained = open_trained(tmp_path / "small", "cpu").loaded.model
    for (name, a), (_, b) in zip(model.named_parameters(), trained.named_parameters()):
        assert torch.equal(a, b), name
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("3+4=")["input_ids"]


@pytest.mark.parametrize("dora", [False, True])
def test_exported_adapters_open_with_peft_and_are_the_merged_model(tmp_path: Path, dora: bool) -> None:
    peft = pytest.importorskip("peft")
    made = make_tiny(TinyModel(**RECIPE["model"]["tiny"]), torch.float32, 0, torch.device("cpu"))
    save_folder(made.model, made.tokenizer, tmp_path / "base")
    learn = {"lr": 1e-2, "lora_rank": 4, "lora_alpha": 16.0, "dora": dora}
    train = {**RECIPE["train"], "steps": 2}
    launch.train(
        {**RECIPE, "folder": str(tmp_path), "model": {"path": str(tmp_path / "base")}, "train": train, "learn": learn}
    )
    export(tmp_path / "small", tmp_path / "merged")
    assert export_adapter(tmp_path / "small", tmp_path / "adapter") == (2, False)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tokens = torch.arange(3, 20)[None]
    before = plain(tokens).logits.detach().clone()
    adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")(tokens).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens).logits
    torch.testing.assert_close(adapted, merged, atol=1e-5, rtol=1e-4)
    assert (adapted - before).abs().max() > 1e-3


def test_the_running_mean_is_what_is_measured_asked_and_exported_unless_the_weights_themselves_are_wanted(
    tmp_path: Path,
) -> None:
    run = tmp_path / "small"
    learn, train = {"lr": 3e-2, "ema": 0.5}, {**RECIPE["train"], "steps": 3}
    summary = launch.train({**RECIPE, "folder": str(tmp_path), "train": train, "learn": learn})
    tensors, _ = checkpoint.load(checkpoint.latest(run / "checkpoints").path)
    for raw, prefix in ((False, "ema."), (True, "model.")):
        opened = open_trained(run, "cpu", raw=raw)
        assert opened.is_mean is not raw
        export(run, tmp_path / prefix, raw=raw)
        written = dict(AutoModelForCausalLM.from_pretrained(tmp_path / prefix).named_parameters())
        for name, weight in opened.loaded.model.named_parameters():
            assert torch.equal(weight, tensors[f"{prefix}{name}"]) and torch.equal(written[name], weight), name
    assert any(not torch.equal(tensors[f"ema.{n}"], tensors[f"model.{n}"]) for n in written)
    mean, raw = (launch.evaluate(run, size=8, raw=raw) for raw in (False, True))
    assert summary.after is not None
    assert [a.response for a in mean.answers] == [a.response for a in summary.after.answers]
    assert [a.response for a in raw.answers] != [a.response for a in mean.answers]


@pytest.mark.parametrize("dora", [False, True])
def test_the_running_mean_of_adapters_is_exported_merged_and_alone(tmp_path: Path, dora: bool) -> None:
    peft = pytest.importorskip("peft")
    made = make_tiny(TinyModel(**RECIPE["model"]["tiny"]), torch.float32, 0, torch.device("cpu"))
    save_folder(made.model, made.tokenizer, tmp_path / "base")
    learn = {"lr": 3e-2, "lora_rank": 4, "dora": dora, "ema": 0.5}
    over = {"train": {**RECIPE["train"], "steps": 2}, "eval": {"size": 0}, "learn": learn}
    launch.train({**RECIPE, "folder": str(tmp_path), "model": {"path": str(tmp_path / "base")}, **over})
    tokens, found = torch.arange(3, 20)[None], {}
    for raw in (False, True):
        folder = tmp_path / f"raw-{raw}"
        export(tmp_path / "small", folder / "merged", raw=raw)
        assert export_adapter(tmp_path / "small", folder / "adapter", raw=raw) == (2, not raw)
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        adapted = peft.PeftModel.from_pretrained(base, folder / "adapter")(tokens).logits
        found[raw] = AutoModelForCausalLM.from_pretrained(folder / "merged")(tokens).logits
        torch.testing.assert_close(adapted, found[raw], atol=1e-5, rtol=1e-4)
    assert (found[True] - found[False]).abs().max() > 1e-3


def test_the_command_says_that_it_exported_a_running_mean(tmp_path: Path) -> None:
    over = {"train": {**RECIPE["train"], "steps": 1}, "eval": {"size": 0}, "learn": {"ema": 0.9}}
    launch.train({**RECIPE, "folder": str(tmp_path), **over})
    said = [
        CliRunner().invoke(app, ["export", str(tmp_path / "small"), "--to", str(tmp_path / f"m{len(more)}"), *more])
        for more in ([], ["--raw"])
    ]
    assert [("running mean" in " ".join(each.output.split()), each.exit_code) for each in said] == [
        (True, 0),
        (False, 0),
    ]


def test_a_run_without_adapters_says_so(tmp_path: Path) -> None:
    launch.train({**RECIPE, "folder": str(tmp_path), "train": {**RECIPE["train"], "steps": 1}})
    with pytest.raises(ConfigError, match="no adapters"):
        export_adapter(tmp_path / "small", tmp_path / "adapter")


def test_adapters_of_a_reward_model_are_exported_merged_and_not_alone(tmp_path: Path) -> None:
    """peft would find no module of their names, and its folder has no place for the head."""
    data = {"source": "reversal", "args": {"pairs": True}, "max_prompt_tokens": 16}
    train, learn = {**RECIPE["train"], "steps": 1}, {"lr": 1e-2, "lora_rank": 2, "ema": 0.5}
    launch.train(
        {**RECIPE, "folder": str(tmp_path), "data": data, "train": train, "learn": learn, "algorithm": "reward_model"}
        | {"eval": {"size": 0}, "rewards": "exact"}
    )
    with pytest.raises(ConfigError, match="reward model"):
        export_adapter(tmp_path / "small", tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
    assert export(tmp_path / "small", tmp_path / "merged").reward_head is not None
