"""Every architecture that the docs name is learned as transformers computes it; what cannot be is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.learn.grouped import grouped
from tests.rollout.tiny import MODELS, VOCAB, tiny_model
from transformers import AutoModelForCausalLM

from tidemill.check.model_folder import folder_problems
from tidemill.errors import ModelError
from tidemill.learn.engine import score
from tidemill.models.attention.registry import plain
from tidemill.models.trial import try_out
from tidemill.recipe.config import Config

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_packed_logprobs_are_transformers_own(name: str) -> None:
    model = tiny_model(name)
    try_out(model)
    batch = grouped(np.random.default_rng(0), 3, 3, longest=25, words=VOCAB - 1)
    settings = {"algorithm": "grpo", "rollout": {"temperature": 0.7}, "train": {"tokens_per_microbatch": 90}}
    ours = score(model, batch, Config.model_validate(settings))
    for row in range(batch.rows):
        tokens = torch.from_numpy(batch["tokens"][row].astype(np.int64))
        first = int(batch.values("prompt_length")[row])
        with torch.no_grad(), plain(model):
            theirs = (model(tokens[None], use_cache=False).logits[0] / 0.7).log_softmax(-1)
        wanted = theirs[first - 1 : -1].gather(1, tokens[first:, None])[:, 0]
        np.testing.assert_allclose(ours[row], wanted.numpy(), atol=1e-4)


def strange(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="tidemill").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return model


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("Qwen3NextConfig", {"num_experts": 4, "num_experts_per_tok": 2, "layer_types": ["linear_attention"] * 3},
         "layers of linear_attention"),
        ("CodeGenConfig", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
         "other logits of packed samples"),
        ("BloomConfig", {"n_layer": 2, "n_head": 4}, "other logits of packed samples"),
        ("StableLmConfig", {}, "cannot be learned from packed rows"),
    ],
)  # fmt: skip
def test_a_model_that_mixes_samples_is_refused(kind: str, changes: dict[str, Any], why: str) -> None:
    model = strange(kind, **changes)
    with pytest.raises(ModelError, match=why):
        try_out(model)
    assert model.config._attn_implementation == "tidemill"


def test_a_logit_scale_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("granite")
    monkeypatch.setattr("tidemill.models.logits.scale", lambda settings: 1.0)
    with pytest.raises(ModelError, match="changes logits"):
        try_out(model)


def test_layers_of_another_kind_are_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    text = {"layer_types": ["full_attention", "linear_attention"]}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}), encoding="utf-8")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer.json").touch()
    (told,) = folder_problems("model.path", str(tmp_path))
    assert "linear_attention" in told
