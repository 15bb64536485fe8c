"""Rollout with 8-bit weights: products of rounded numbers, near the model's own, and rounded again from new weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.rollout.tiny import VOCAB, roll, tiny_model
from torch import nn

from tidemill.errors import ConfigError, ModelError
from tidemill.models.layers.eight import DTYPES, EightWeight, encode, rounded
from tidemill.rollout.engine import Completion, Request, Sampling
from tidemill.rollout.hf import _plain
from tidemill.rollout.mismatch import Mismatch, measure
from tidemill.rollout.native.engine import NativeEngine


def make(model: Any, weights: Any, **options: Any) -> NativeEngine:
    settings = {"max_seqs": 6, "max_len": 80, "page_size": 16, "step_tokens": 24, "speculate": "off", **options}
    return NativeEngine(model, eos_ids=[2], weights=weights, **settings)


def asked() -> list[Request]:
    rng = np.random.default_rng(3)
    return [
        Request(i, rng.integers(3, VOCAB, 3 + 9 * i).tolist(), Sampling(max_tokens=24, seed=5), n=3) for i in range(4)
    ]


def gap(model: Any, done: dict[Any, Completion]) -> Mismatch:
    """Between an engine's log-probabilities and those of the module as it now computes."""
    ours, theirs = [], []
    for completion in done.values():
        start = len(completion.request.prompt)
        ids = torch.tensor([[*completion.request.prompt, *completion.tokens]])
        with torch.no_grad(), _plain(model):
            logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1]
        theirs.append(logits.log_softmax(-1).gather(1, ids[0, start:, None])[:, 0].numpy())
        ours.append(np.array(completion.logprobs, np.float32))
    return measure(np.concatenate(ours), np.concatenate(theirs))


def as_rounded(model: Any, dtype: torch.dtype) -> None:
    """The oracle: every product computed in float64 from what the rounded numbers stand for."""

    def decoded(x: torch.Tensor) -> torch.Tensor:
        code, scale = encode(x, dtype)
        return code.double() * scale.double()[..., None]

    def forward(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        out = F.linear(decoded(x), decoded(linear.weight.detach())).float()
        return out if linear.bias is None else out + linear.bias

    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.forward = forward.__get__(module)  # type: ignore[method-assign]


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_a_product_is_that_of_the_rounded_numbers(weights: str) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(24, 40) * torch.logspace(-4, 2, 24)[:, None], torch.randn(8, 40), torch.zeros(8, 40)]
    x, bias = torch.randn(5, 40) * torch.logspace(-3, 3, 5)[:, None], torch.randn(40)
    weight, row = EightWeight(parts, DTYPES[weights]), rounded(x, DTYPES[weights])
    wide = weight.code.double() * weight.scale.double()[:, None]
    expected = (row.code.double() * row.scale.double()[:, None]) @ wide.t() + bias
    torch.testing.assert_close(weight.multiply(x, bias), expected.float(), rtol=1e-5, atol=1e-5)
    assert (wide - torch.cat(parts)).abs().max() > 0
    parts[1].mul_(-3.0)
    at = weight.code.data_ptr()
    weight.refresh()
    assert weight.code.data_ptr() == at
    assert torch.equal(weight.code, EightWeight(parts, DTYPES[weights]).code)


@pytest.mark.parametrize("weights", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_an_engine_computes_what_the_module_does_of_rounded_numbers(name: str, weights: str) -> None:
    model = tiny_model(name)
    done = roll(make(model, weights), asked())
    far = gap(model, done)
    as_rounded(model, DTYPES[weights])
    near = gap(model, done)  # a sum in another order may round one number the other way
    assert near.mean < 0.1 * far.mean and 1e-4 < far.mean < (0.02 if weights == "int8" else 0.08)
    assert abs(far.ratio_mean - 1) < 0.02


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3", "gpt-oss", "llama"])
def test_every_lean_model_stays_near_its_own(name: str) -> None:
    model = tiny_model(name)
    far = gap(model, roll(make(model, "int8"), asked()))
    assert 1e-5 < far.mean < 0.03


def test_new_weights_are_rounded_when_they_are_loaded() -> None:
    model = tiny_model("qwen3")
    engine = make(model, "int8")
    before = roll(engine, asked())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    engine.load(None, 1)
    after = roll(engine, asked())
    fresh = roll(make(model, "int8"), asked())
    assert {k: c.tokens for k, c in after.items()} == {k: c.tokens for k, c in fresh.items()}
    assert any(before[key].tokens != after[key].tokens for key in after)


def test_what_cannot_be_served_in_8_bits_is_refused() -> None:
    with pytest.raises(ModelError, match="cannot be served with 8-bit weights"):
        make(tiny_model("gemma2"), "int8")
    with pytest.raises(ConfigError, match="round"):
        make(tiny_model("qwen3"), "int8", batch_invariant=True)
