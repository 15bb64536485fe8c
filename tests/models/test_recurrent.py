"""Layers with a state over packed rows: what goes from sample to sample, and what transformers' cache would say."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import _families_tiny as tiny
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from tidemill.models import lora
from tidemill.models.attention.contexts import choose
from tidemill.models.calling import hidden_states
from tidemill.models.recurrent.states import LayerStates

CPU = torch.device("cpu")


@pytest.mark.parametrize("lengths", [[3], [1, 1, 5], [9, 2, 1], [4, 4]])
def test_states_are_those_of_transformers_cache(lengths: list[int]) -> None:
    ours, theirs = LayerStates(), LinearAttentionLayer()
    for step, tokens in enumerate(lengths):
        x = torch.randn(2, 6, tokens)
        made, wanted = (one.update_conv_state(x, conv_kernel_size=4) for one in (ours, theirs))
        assert torch.equal(made[..., -tokens:], wanted[..., -tokens:])
        assert torch.equal(ours.conv_states[0], theirs.conv_states[0])
        state = torch.full((2, 3), float(step))
        assert torch.equal(ours.update_recurrent_state(state), theirs.update_recurrent_state(state))


def row_of(model: Any, samples: list[Tensor]) -> Tensor:
    context = choose(model).packed([len(sample) for sample in samples], CPU)
    positions = torch.cat([torch.arange(len(sample)) for sample in samples])
    return hidden_states(model, context, input_ids=torch.cat(samples)[None], position_ids=positions[None])


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "jamba", "lfm2"])
def test_no_token_reaches_another_sample_and_no_earlier_one(family: str) -> None:
    model, _ = tiny.models(family)
    rng = torch.Generator().manual_seed(0)
    samples = [torch.randint(3, tiny.VOCAB, (n,), generator=rng) for n in (9, 6, 1, 11)]
    made = row_of(model, samples)
    changed = [sample.clone() for sample in samples]
    changed[1][3] = (changed[1][3] + 1) % tiny.VOCAB
    other = row_of(model, changed)
    is_same = (made == other).all(-1)
    assert is_same[: 9 + 3].all() and not is_same[9 + 3 : 9 + 6].any() and is_same[9 + 6 :].all()


def test_a_copy_of_a_model_keeps_its_mixers() -> None:
    model, _ = tiny.models("qwen3_5_text")
    twin = copy.deepcopy(model)
    samples = [torch.arange(3, 10), torch.arange(5, 9)]
    with torch.no_grad():
        wanted = row_of(model, samples)
        for p in model.parameters():
            p.zero_()
        assert torch.equal(row_of(twin, samples), wanted)


def test_adapters_learn_through_states() -> None:
    model, _ = tiny.models("qwen3_5_text")
    samples = [torch.arange(3, 10), torch.arange(5, 9)]
    with torch.no_grad():
        before = row_of(model, samples)
    lora.attach(model, rank=2, alpha=4.0)
    assert torch.equal(row_of(model, samples), before)
    row_of(model, samples).square().sum().backward()
    adapted = {name for name, p in model.named_parameters() if name.endswith("lora_b") and bool(p.grad.any())}
    assert {n.split(".")[-2] for n in adapted} >= {"in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "down_proj"}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("lora_b"):
                p.copy_(torch.from_numpy(np.random.default_rng(0).normal(size=p.shape) * 0.1))
        learned = row_of(model, samples)
        whole = {name: tensor.clone() for name, tensor in lora.merged(model).items()}
    lora.detach(model)
    model.load_state_dict(whole, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(row_of(model, samples), learned, atol=1e-5, rtol=1e-4)
