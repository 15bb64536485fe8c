"""Fused norms and gates give what the modules give, forward and backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from tidemill.config import TinyModel
from tidemill.models import fused
from tidemill.models.contexts import KINDS
from tidemill.models.load import make_tiny

pytestmark = pytest.mark.skipif(fused._library() is None, reason="no C compiler here")


@pytest.fixture(autouse=True)
def _one_maker_of_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of fused modules are the same on all."""
    monkeypatch.setattr(fused, "_is_mkl_slow", lambda: False)


class Width:
    """As much of a config as an MLP reads."""

    hidden_size, intermediate_size, hidden_act, mlp_bias = 24, 37, "silu", False


def norm(width: int) -> Any:
    made = Qwen3RMSNorm(width, eps=1e-6)
    torch.nn.init.normal_(made.weight)
    return made


def gradients(module: Any, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = module(x)
    out.backward(torch.sin(torch.arange(out.numel(), dtype=out.dtype)).reshape(out.shape))
    assert x.grad is not None
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(1, 1, 16), (1, 70, 24), (1, 33, 3, 7), (2, 129, 128)], ids=str)
def test_a_norm_and_its_gradients_equal_the_modules_own(shape: tuple[int, ...], threads: int) -> None:
    torch.manual_seed(0)
    plain = norm(shape[-1])
    other = copy.deepcopy(plain)
    assert fused.fuse(other) == 1
    x = 3 * torch.randn(shape)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for ours, theirs in zip(gradients(other, x), gradients(plain, x)):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("tokens", [1, 5, 400])
def test_a_gated_mlp_and_its_gradients_equal_the_modules_own(tokens: int) -> None:
    torch.manual_seed(0)
    plain = Qwen3MLP(Width())
    other = copy.deepcopy(plain)
    assert fused.fuse(other) == 1
    x = 8 * torch.randn(1, tokens, 24)  # gates far from 0 too
    for ours, theirs in zip(gradients(other, x), gradients(plain, x)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


def test_extreme_gates_stay_finite_and_nan_stays_nan() -> None:
    gate = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4, float("nan")] * 4, requires_grad=True)
    up = torch.ones(24, requires_grad=True)
    y = fused._Gated.apply(gate, up)
    y.sum().backward()
    is_nan = gate.isnan()
    for found in (y, gate.grad, up.grad):
        assert found[~is_nan].isfinite().all() and found[is_nan].isnan().all()
    torch.testing.assert_close(y[~is_nan], torch.nn.functional.silu(gate[~is_nan]))


def test_a_norm_of_another_kind_is_left_alone() -> None:
    other = Gemma2RMSNorm(16)
    other.variance_epsilon = other.eps  # as if it were one of those that are known; its weight counts from 1
    torch.nn.init.normal_(other.weight)
    assert fused.fuse(other) == 0


def test_other_tensors_go_through_the_module() -> None:
    module = norm(16)
    fused.fuse(module)
    module = module.double()
    assert module(torch.randn(1, 4, 16, dtype=torch.float64)).dtype == torch.float64


def test_a_copy_of_a_fused_model_uses_its_own_weights() -> None:
    shape = TinyModel(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, window=64)
    model = make_tiny(shape, torch.float32, 0, torch.device("cpu")).model
    assert fused.fuse(model) == 2 * 6 + 1  # four norms, an MLP and the attention of a layer, and the last norm
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    hidden = torch.randn(1, 3, 32)
    assert other.model.norm(hidden).abs().sum() > 0 and model.model.norm(hidden).abs().sum() == 0


ARCHITECTURES = {
    "Qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "Qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "Llama": (LlamaConfig, LlamaForCausalLM, {}),
    "Mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 3}),
}


def tiny(name: str, **more: Any) -> Any:
    config, model, own = ARCHITECTURES[name]
    small = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 19, "head_dim": 6}
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return model._from_config(config(**small, **heads, **own, **more), attn_implementation="tidemill")


def update_of(model: Any, hidden: Any) -> list[torch.Tensor]:
    context = KINDS["blocks"].packed([5, 1, 7], torch.device("cpu"))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5, 6]])
    logits = model(inputs_embeds=hidden, position_ids=positions, tide=context, use_cache=False).logits
    logits.backward(torch.sin(torch.arange(logits.numel(), dtype=logits.dtype)).reshape(logits.shape))
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_attention_layers_with_fused_positions_and_their_gradients_are_the_modules_own(name: str, threads: int) -> None:
    plain = tiny(name)
    other = copy.deepcopy(plain)
    assert fused.fuse(other) and all("forward" in vars(layer.self_attn) for layer in other.model.layers)
    hidden, before = torch.randn(1, 13, 24), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for ours, theirs in zip(update_of(other, hidden), update_of(plain, hidden), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(before)


def test_attention_of_another_implementation_or_shape_is_left_alone() -> None:
    other = tiny("Llama")
    other.config._attn_implementation = "eager"
    fused.fuse(other)
    assert not any("forward" in vars(layer.self_attn) for layer in other.model.layers)
    x = torch.randn(5, 2, 6)
    with pytest.raises(RuntimeError, match=r"positions of \(5, 4\) do not fit"):
        fused._Turned.apply(x, torch.ones(5, 4), torch.zeros(5, 4))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 512, 24), (3, 300, 17), (1, 20, 24)], ids=str)
def test_a_product_by_the_other_library_and_its_gradients_are_the_modules_own(
    shape: tuple[int, ...], has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "_is_mkl_slow", lambda: True)
    torch.manual_seed(0)
    plain = torch.nn.Linear(shape[-1], 31, bias=has_bias)
    other = copy.deepcopy(plain)
    assert fused.fuse(other) == 1
    x = torch.randn(shape)
    for ours, theirs in zip(gradients(other, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


def test_a_frozen_weight_gets_no_gradient_and_its_input_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_is_mkl_slow", lambda: True)
    linear = torch.nn.Linear(8, 8, bias=False).requires_grad_(False)
    fused.fuse(linear)
    x = torch.randn(1, 600, 8, requires_grad=True)
    linear(x).sum().backward()
    assert linear.weight.grad is None
    torch.testing.assert_close(x.grad, linear.weight.sum(0).expand_as(x))
