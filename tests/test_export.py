"""An exported run is an ordinary Hugging Face folder: transformers opens it, with the same weights and its cache on."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.faults.test_resume import RECIPE
from tidemill import launch
from tidemill.trained import export, open_trained


def test_an_exported_run_opens_with_transformers_and_generates_with_a_cache(tmp_path: Path) -> None:
    launch.train({**RECIPE, "folder": str(tmp_path), "train": {**RECIPE["train"], "steps": 1}})
    export(tmp_path / "small", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.use_cache and model.generation_config.use_cache is not False
    trained = open_trained(tmp_path / "small", "cpu").loaded.model
    for (name, a), (_, b) in zip(model.named_parameters(), trained.named_parameters()):
        assert torch.equal(a, b), name
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("3+4=")["input_ids"]
