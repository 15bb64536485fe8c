"""The memory estimate against autograd here, and against peaks measured on a device (docs/results/learn.md)."""

import pytest
import torch
from tests.settings.test_estimate import make

from tidemill import recipe
from tidemill.config import Learn, Model, TinyModel
from tidemill.settings import estimate
from tidemill.settings.memory import Memory, activation_bytes, host_bytes, memory

QWEN_1_5B = estimate.Shape(1536, 28, 12, 2, 128, 8960, 151936, 32768, 1_543_714_304)
GIB = 2**30
# Groups of 8 samples of 256 + 512 tokens, tokens a pass, settings, peak GiB on an H200 with torch 2.11.
MEASURED = [
    (64, 16384, ["learn.share_prompts=false", "learn.logprob_chunk=8192"], 50.5),
    (64, 32768, ["learn.share_prompts=false", "learn.recompute=full"], 19.9),
    (64, 16384, ["learn.logprob_chunk=8192"], 46.0),
    (64, 32768, ["learn.recompute=full"], 20.0),
    (16, 32768, ["learn.share_prompts=false", "learn.recompute=full", "learn.recompute_every=2"], 41.8),
    (16, 16384, ["learn.share_prompts=false"], 45.2),
    (16, 32768, ["learn.share_prompts=false"], 64.3),
    (16, 32768, [], 67.5),
]


def needed(*overrides: str) -> Memory:
    config = recipe.load({}, overrides).config
    found = memory(config, estimate.shape_of(config.model))
    assert found is not None
    return found


@pytest.mark.parametrize(("groups", "tokens", "learn", "peak"), MEASURED)
def test_the_estimate_is_within_a_tenth_of_peaks_measured_on_a_device(groups, tokens, learn, peak):
    settings = ["model.dtype=bfloat16", "train.samples_per_prompt=8", f"train.prompts_per_step={groups}"]
    settings += ["data.max_prompt_tokens=256", "rollout.max_new_tokens=512", f"train.tokens_per_microbatch={tokens}"]
    found = memory(recipe.load({}, [*settings, *learn]).config, QWEN_1_5B, on_accelerator=True)
    guess = (found.total - found.cache) / GIB
    assert guess == pytest.approx(peak, rel=0.1), [(n, round(size / GIB, 2)) for n, size in found.parts()]


def test_the_activation_estimate_is_near_what_autograd_keeps():
    tiny = TinyModel(hidden=128, layers=3, heads=4, kv_heads=2, intermediate=384)
    model, tokens, kept = make(tiny).model, 300, {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(input_ids=torch.randint(0, 90, (1, tokens)), use_cache=False).last_hidden_state
    measured = sum(size for pointer, size in kept.items() if pointer not in weights)
    assert out.requires_grad
    guess = activation_bytes(estimate.shape_of(Model(tiny=tiny)), tokens, 4, Learn(), is_compiled=False)
    assert 0.75 < guess / measured < 1.35, f"estimated {guess:,}, measured {measured:,}"


def test_a_reference_model_and_a_critic_are_counted():
    assert needed().reference == 0
    assert needed("algorithm.kl.coef=0.1").reference == needed("algorithm=dpo").reference == needed().weights
    assert needed("algorithm.kl.coef=0.1", "learn.lora_rank=4").reference == 0  # the same model, adapters off
    assert needed().critic == 0
    assert needed("algorithm=ppo").critic == 4 * needed().weights


def test_what_leaves_the_device_is_counted_on_the_host():
    def on_host(*overrides: str) -> int:
        config = recipe.load({}, ["model.dtype=bfloat16", *overrides]).config
        return host_bytes(config, QWEN_1_5B)

    count = QWEN_1_5B.parameters
    assert on_host() == 0
    assert on_host("learn.optimizer_on_host=true") == 8 * count
    assert on_host("learn.optimizer_on_host=true", "learn.master=float32") == 12 * count
    assert on_host("learn.optimizer_on_host=true", "learn.lora_rank=8") < count
    assert on_host("learn.offload=activations") > 2**30


def test_every_setting_that_saves_memory_is_known():
    kinds = [needed(f"learn.recompute={kind}").activations for kind in ("none", "selective", "mlp", "full")]
    assert kinds == sorted(kinds, reverse=True) and len(set(kinds)) == 4
    every = needed("learn.recompute=full", "learn.recompute_every=2").activations
    assert kinds[-1] < every < kinds[0]
    assert needed("learn.offload=activations").activations < kinds[0]
    assert needed("learn.optimizer_on_host=true").optimizer == 0
    assert needed("learn.moments=int8").optimizer < needed().optimizer / 3
    assert needed("learn.lora_rank=4").gradients < needed().gradients / 10
    assert needed("learn.logprob_chunk=16").logits < needed().logits
    assert needed("rollout.cache_tokens=64").cache < needed().cache
    wide = needed("model.dtype=bfloat16", "learn.master=float32")
    narrow = needed("model.dtype=bfloat16")
    assert (wide.gradients, wide.optimizer) == (2 * narrow.gradients, 3 * narrow.optimizer)


def test_a_separated_rollout_has_its_own_weights_and_the_next_ones_beside_them():
    plain, apart = (recipe.load({}, ["flow.schedule=async"] * is_apart).config for is_apart in (False, True))
    shape = estimate.shape_of(plain.model)
    assert memory(apart, shape).copies == 2 * memory(plain, shape).weights
    assert memory(plain, shape).copies == 0
