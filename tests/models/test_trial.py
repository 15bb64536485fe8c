"""Every architecture that the docs name is learned as transformers computes it; what cannot be is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.learn.grouped import grouped
from tests.rollout.tiny import MODELS, VOCAB, tiny_model
from transformers import AutoModelForCausalLM

from tidemill.errors import ModelError
from tidemill.learn.engine import score
from tidemill.models.attention.registry import is_dense, plain
from tidemill.models.recurrent import mixers
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
    ("kind", "changes"),
    [
        ("CodeGenConfig", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}),
        ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    ],
)
def test_a_model_that_mixes_samples_in_a_row_is_computed_densely(kind: str, changes: dict[str, Any]) -> None:
    model = strange(kind, **changes)
    try_out(model)
    assert is_dense(model)


def test_a_model_whose_head_does_more_than_one_product_is_refused() -> None:
    model = strange("BertConfig", is_decoder=True)
    with pytest.raises(ModelError, match="makes logits of hidden states in a way"):
        try_out(model)
    assert model.config._attn_implementation == "tidemill"


def test_states_that_go_wrong_behind_a_shared_prompt_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.models.recurrent.mixers.FROM_NOTHING", frozenset())
    model = strange("JambaConfig", num_experts=2, attn_layer_period=3, attn_layer_offset=2)
    mixers.plug(model)
    try_out(model)
    assert is_dense(model)  # Mamba-1's scan does not take the state: whole samples are right all the same


def test_a_logit_scale_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("granite")
    monkeypatch.setattr("tidemill.models.logits.scale", lambda settings: 1.0)
    with pytest.raises(ModelError, match="makes logits of hidden states in a way"):
        try_out(model)
