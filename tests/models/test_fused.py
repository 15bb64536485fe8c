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
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from tidemill.learn.layers import recompute
from tidemill.models import lora
from tidemill.models.attention.contexts import KINDS
from tidemill.models.layers import forms as family
from tidemill.models.layers import fused
from tidemill.models.load import make_tiny
from tidemill.recipe.config import TinyModel

pytestmark = pytest.mark.skipif(fused.code() is None, reason="no C compiler here")


@pytest.fixture(autouse=True)
def _one_maker_of_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of fused modules are the same on all."""
    monkeypatch.setattr(fused, "is_mkl_slow", lambda: False)


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
    assert family.fuse(other) == 1
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
    assert family.fuse(other) == 1
    x = 8 * torch.randn(1, tokens, 24)  # gates far from 0 too
    for ours, theirs in zip(gradients(other, x), gradients(plain, x)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


def test_extreme_gates_stay_finite_and_nan_stays_nan() -> None:
    gate = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4, float("nan")] * 4)
    both = torch.cat([gate, torch.ones(24)])[None].requires_grad_()
    y = fused.Gated.apply(both)[0]
    y.sum().backward()
    is_nan = gate.isnan()
    for found in (y, both.grad[0, :24], both.grad[0, 24:]):
        assert found[~is_nan].isfinite().all() and found[is_nan].isnan().all()
    torch.testing.assert_close(y[~is_nan], torch.nn.functional.silu(gate[~is_nan]))


def test_a_norm_of_another_kind_is_left_alone() -> None:
    other = Gemma2RMSNorm(16)
    other.variance_epsilon = other.eps  # as if it were one of those that are known; its weight counts from 1
    torch.nn.init.normal_(other.weight)
    assert family.fuse(other) == 0


@pytest.mark.parametrize("kind", [BambaRMSNormGated, Qwen3NextRMSNormGated], ids=lambda kind: kind.__name__)
def test_a_norm_that_takes_a_gate_does_it_itself(kind: Any) -> None:
    plain = kind(16)
    torch.nn.init.normal_(plain.weight)
    other = copy.deepcopy(plain)
    family.fuse(other)
    x, gate = torch.randn(2, 5, 16)
    torch.testing.assert_close(other(x, gate), plain(x, gate))


def test_other_tensors_go_through_the_module() -> None:
    module = norm(16)
    family.fuse(module)
    module = module.double()
    assert module(torch.randn(1, 4, 16, dtype=torch.float64)).dtype == torch.float64


def test_a_copy_of_a_fused_model_uses_its_own_weights() -> None:
    shape = TinyModel(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, window=64)
    model = make_tiny(shape, torch.float32, 0, torch.device("cpu")).model
    assert family.fuse(model) == 2 * 7 + 1  # a layer, its four norms, MLP and attention; and the last norm
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


def update_of(model: Any, hidden: Any, lengths: tuple[int, ...] = (5, 1, 7)) -> list[torch.Tensor]:
    context = KINDS["blocks"].packed(lengths, torch.device("cpu"))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    logits = model(inputs_embeds=hidden, position_ids=positions, tide=context, use_cache=False).logits
    logits.backward(torch.sin(torch.arange(logits.numel(), dtype=logits.dtype)).reshape(logits.shape))
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def is_fused(module: Any) -> bool:
    return "forward" in vars(module)


def assert_same_update(ours: Any, theirs: Any, lengths: tuple[int, ...] = (5, 1, 7)) -> None:
    hidden = torch.randn(1, sum(lengths), 24)
    for mine, other in zip(update_of(ours, hidden, lengths), update_of(theirs, hidden, lengths), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5 * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize("part", ["layers", "attention"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_fused_layers_and_their_gradients_are_the_modules_own(name: str, threads: int, part: str) -> None:
    plain = tiny(name)
    other = copy.deepcopy(plain)
    assert family.fuse(other) and all(is_fused(m) and is_fused(m.self_attn) for m in other.model.layers)
    for layer in other.model.layers if part == "attention" else ():
        del layer.forward
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_same_update(other, plain)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layers_of_many_tokens_go_through_the_other_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny(name)
    other = copy.deepcopy(plain)
    monkeypatch.setattr(fused, "is_mkl_slow", lambda: True)
    assert family.fuse(other)
    assert_same_update(other, plain, (300, 13, 250))


@pytest.mark.parametrize(
    "path", ["mlp", "self_attn", "input_layernorm", "self_attn.q_proj", "mlp.down_proj", "self_attn.o_proj"]
)
def test_a_hook_inside_a_fused_layer_is_heard(path: str) -> None:
    model, heard = tiny("Llama"), []
    family.fuse(model)
    model.model.layers[0].get_submodule(path).register_forward_hook(lambda *_: heard.append(path))
    update_of(model, torch.randn(1, 13, 24))
    assert heard == [path]


@pytest.mark.parametrize("kind", ["mlp", "selective", "full"])
def test_recomputed_parts_stay_recomputed_in_a_fused_layer(kind: Any) -> None:
    plain = tiny("Qwen3")
    other = copy.deepcopy(plain)
    recompute(other, kind)
    family.fuse(other)
    assert_same_update(other, plain)
    own = other.model.layers[0].mlp.forward.__func__
    assert kind == "full" or own is not fused.mlp


def test_adapted_layers_are_fused_around_their_adapters() -> None:
    plain = tiny("Qwen2")
    lora.attach(plain, 2, 4.0)
    with torch.no_grad():
        for name, p in plain.named_parameters():
            if name.endswith("lora_b"):
                p.normal_()
    other = copy.deepcopy(plain)
    family.fuse(other)
    assert all(is_fused(layer) for layer in other.model.layers)
    assert_same_update(other, plain)


def test_attention_of_another_implementation_or_shape_is_left_alone() -> None:
    other = tiny("Llama")
    other.config._attn_implementation = "eager"
    family.fuse(other)
    assert not any("forward" in vars(layer.self_attn) for layer in other.model.layers)
    x = torch.randn(5, 4 * 6)
    with pytest.raises(RuntimeError, match=r"positions of \(5, 4\) and \(2, 1\) heads do not fit"):
        fused.Placed.apply(x, None, torch.ones(5, 4), torch.zeros(5, 4), (2, 1), 0.0)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 512, 24), (3, 300, 17), (1, 20, 24)], ids=str)
def test_a_product_by_the_other_library_and_its_gradients_are_the_modules_own(
    shape: tuple[int, ...], has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "is_mkl_slow", lambda: True)
    torch.manual_seed(0)
    plain = torch.nn.Linear(shape[-1], 31, bias=has_bias)
    other = copy.deepcopy(plain)
    assert family.fuse(other) == 1
    x = torch.randn(shape)
    for ours, theirs in zip(gradients(other, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


def test_a_frozen_weight_gets_no_gradient_and_its_input_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "is_mkl_slow", lambda: True)
    linear = torch.nn.Linear(8, 8, bias=False).requires_grad_(False)
    family.fuse(linear)
    x = torch.randn(1, 600, 8, requires_grad=True)
    linear(x).sum().backward()
    assert linear.weight.grad is None
    torch.testing.assert_close(x.grad, linear.weight.sum(0).expand_as(x))
