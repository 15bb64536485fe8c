"""An exported run is an ordinary Hugging Face folder: transformers opens it, with the same weights and its cache on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.faults.test_resume import RECIPE
from tidemill import launch
from tidemill.config import TinyModel
from tidemill.errors import ConfigError
from tidemill.models.load import make_tiny, save_folder
from tidemill.trained import export, export_adapter, open_trained


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
    assert export_adapter(tmp_path / "small", tmp_path / "adapter") == 2
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tokens = torch.arange(3, 20)[None]
    before = plain(tokens).logits.detach().clone()
    adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")(tokens).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens).logits
    torch.testing.assert_close(adapted, merged, atol=1e-5, rtol=1e-4)
    assert (adapted - before).abs().max() > 1e-3


def test_a_run_without_adapters_says_so(tmp_path: Path) -> None:
    launch.train({**RECIPE, "folder": str(tmp_path), "train": {**RECIPE["train"], "steps": 1}})
    with pytest.raises(ConfigError, match="no adapters"):
        export_adapter(tmp_path / "small", tmp_path / "adapter")
