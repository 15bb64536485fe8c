"""Adapters of a mixture's stacked experts: the changed weights' own results, wherever they go."""

import copy
import json

import numpy as np
import pytest
import torch
from tests.cluster.ports import Copy
from tests.learn.parallel.models import config, gradients, model, samples
from transformers import AutoModelForCausalLM

from tidemill.algorithms.shared.registry import get
from tidemill.errors import ModelError
from tidemill.estimate.memory import adapter_parameters
from tidemill.learn.engine import Learner, freeze, score
from tidemill.models import lora
from tidemill.models.load import make_tiny
from tidemill.models.mixture import experts
from tidemill.models.shape import shape_of
from tidemill.recipe.config import Learn, ModelSettings, TinyModel
from tidemill.rollout.native.engine import NativeEngine

STACK = "model.layers.1.mlp.experts.down_proj"
MIXTURES = ["qwen3-moe", "mixtral", "deepseek-v3"]


def learned(name, updates=2, **learn):
    made, settings = model(name), config(learn={"lr": 1e-2, "lora_rank": 4, "lora_alpha": 8.0, **learn})
    learner = Learner(made, settings, get("grpo"), updates)
    for seed in range(updates):
        learner.accumulate(samples(seed))
        learner.update()
    return learner


@pytest.mark.parametrize("name", MIXTURES)
def test_a_merged_stack_computes_what_the_adapters_do_and_the_reference_does_not(name):
    learner = learned(name)
    merged = lora.merged(learner.model)
    plain = model(name)
    assert not torch.allclose(merged[STACK], plain.state_dict()[STACK], atol=1e-4)  # it did learn
    reference = score(freeze(learner.model), samples(7), config()).values
    np.testing.assert_allclose(reference, score(plain, samples(7), config()).values, atol=1e-5)
    plain.load_state_dict(merged, strict=False)
    with_adapters = learner.logprobs(samples(7)).values
    np.testing.assert_allclose(with_adapters, score(plain, samples(7), config()).values, atol=2e-5)
    assert np.abs(with_adapters - reference).max() > 1e-3


def test_gradients_of_a_stacks_adapters_are_those_of_the_merged_weights():
    learner = learned("mixtral")
    learner.accumulate(samples(3))
    plain = model("mixtral")
    experts.plug(plain)
    plain.load_state_dict(lora.merged(learner.model), strict=False)
    whole = Learner(plain, config(), get("grpo"), 1)
    whole.accumulate(samples(3))
    a, b = (learner.model.get_parameter(f"{STACK}_lora_{side}") for side in "ab")
    grad = plain.get_parameter(STACK).grad
    torch.testing.assert_close(a.grad, 2.0 * b.transpose(1, 2) @ grad, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(b.grad, 2.0 * grad @ a.transpose(1, 2), atol=1e-5, rtol=1e-3)
    assert set(gradients(learner.model)) == set(lora.adapters(learner.model))


def test_experts_may_be_left_alone():
    learner = learned("mixtral", lora_experts=False)
    assert not any("experts" in name for name in lora.adapters(learner.model))
    assert torch.equal(lora.merged(learner.model)[STACK], model("mixtral").state_dict()[STACK])


def test_a_checkpoint_has_them_and_another_learner_goes_on_with_them():
    learner = learned("mixtral")
    again = learned("mixtral", updates=0)
    again.restore(*learner.state())
    for each in (learner, again):
        each.accumulate(samples(5))
    assert learner.update()["grad_norm"] == again.update()["grad_norm"]


def test_rollouts_own_copy_gets_the_merged_stacks():
    made = model("mixtral")
    served = copy.deepcopy(made).requires_grad_(False)
    learner = Learner(made, config(learn={"lr": 1e-2, "lora_rank": 4}), get("grpo"), 1)
    own = Copy(made, served, NativeEngine(served, eos_ids=[1], max_seqs=2, max_len=64))
    learner.accumulate(samples())
    learner.update()
    own.publish(1)
    own.take_up(1)
    for name, weight in lora.merged(made).items():
        torch.testing.assert_close(served.get_parameter(name), weight, atol=1e-6, rtol=1e-5)


def test_without_adapters_again_the_model_is_as_it_was():
    learner = learned("mixtral")
    lora.detach(learner.model)
    wanted = score(model("mixtral"), samples(), config()).values
    np.testing.assert_allclose(score(learner.model, samples(), config()).values, wanted, atol=1e-6)
    assert not lora.adapters(learner.model)


def test_experts_of_an_unknown_form_are_refused_with_what_would_do(monkeypatch):
    monkeypatch.setattr(lora, "is_known", lambda module: False)
    with pytest.raises(ModelError, match="MixtralExperts stacks its experts") as refused:
        Learner(model("mixtral"), config(learn={"lora_rank": 2}), get("grpo"), 1)
    assert "learn.lora_experts=false" in refused.value.remedy


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_peft_opens_them(name, tmp_path):
    peft = pytest.importorskip("peft")
    from safetensors.torch import save_file

    learner = learned(name)
    model(name).save_pretrained(tmp_path / "base")
    tensors, about = lora.peft_files(lora.adapters(learner.model), 4, 8.0, str(tmp_path / "base"))
    (tmp_path / "adapter").mkdir()
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(about))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tokens = torch.arange(3, 40)[None]
    before = base(tokens).logits.detach().clone()
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(tokens).logits
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain.load_state_dict(lora.merged(learner.model), strict=False)
    torch.testing.assert_close(adapted, plain(tokens).logits, atol=1e-4, rtol=1e-4)
    assert (adapted - before).abs().max() > 1e-2


def test_magnitudes_beside_stacked_experts_have_no_form_in_peft():
    learner = learned("mixtral", updates=1, dora=True)
    with pytest.raises(ModelError, match="peft has no magnitudes"):
        lora.peft_files(lora.adapters(learner.model), 4, 8.0, "base")


@pytest.mark.parametrize("experts_too", [True, False])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe", "mixtral"])
def test_the_estimate_counts_every_adapter(architecture, experts_too):
    tiny = TinyModel(architecture=architecture, hidden=32, layers=2, heads=4, kv_heads=2, intermediate=24, experts=4)
    made = make_tiny(tiny, torch.float32, 0, torch.device("cpu")).model
    lora.attach(made, 4, 8.0, experts=experts_too)
    shape = shape_of(ModelSettings(tiny=tiny))
    counted = adapter_parameters(shape, Learn(lora_rank=4, lora_experts=experts_too))
    assert counted == sum(tensor.numel() for tensor in lora.adapters(made).values())
