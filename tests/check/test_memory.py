"""The memory estimate against autograd here, and against peaks measured on a device (docs/results/learn.md)."""

import pytest
import torch
from tests.check.test_estimate import make

from tidemill.algorithms.shared.registry import get
from tidemill.estimate.memory import (
    MemoryEstimate,
    activation_bytes,
    checkpoint_bytes,
    host_bytes,
    memory,
    optimizer_bytes,
    update_bytes,
)
from tidemill.learn.engine import Learner
from tidemill.learn.values.critic import ValueLearner
from tidemill.learn.values.model import ValueModel
from tidemill.models.load import make_tiny
from tidemill.models.shape import ModelShape, shape_of
from tidemill.recipe import load as recipe
from tidemill.recipe.config import Config, Learn, ModelSettings, TinyModel

QWEN_1_5B = ModelShape("qwen2", 1536, 28, 12, 2, 128, 8960, 151936, 32768, parameters=1_543_714_304)
QWEN_7B = ModelShape("qwen2", 3584, 28, 28, 4, 128, 18944, 152064, 32768, parameters=7_615_616_512)
QWEN_32B = ModelShape("qwen2", 5120, 64, 40, 8, 128, 27648, 152064, 32768, parameters=32_763_876_352)
GIB = 2**30
ALONE, FULL = "learn.share_prompts=false", "learn.recompute=full"
MLP, CHUNK = "learn.recompute=mlp", "learn.logprob_chunk=1024"
EIGHT_BITS = ["learn.master=stochastic", "learn.moments=int8"]
# Groups of 8 samples of 256 + 512 tokens, tokens a pass, settings, peak GiB on an H200 with torch 2.11.
MEASURED = [
    (64, 16384, [ALONE, "learn.logprob_chunk=8192"], 50.0),
    (64, 16384, [ALONE, "learn.recompute=selective"], 36.4),
    (64, 16384, [ALONE, MLP], 21.3),
    (64, 16384, [ALONE, MLP, CHUNK, *EIGHT_BITS], 16.5),
    (64, 12288, [ALONE, MLP, CHUNK], 17.6),
    (64, 12288, [ALONE, MLP, CHUNK, *EIGHT_BITS], 14.8),
    (64, 8192, [ALONE, MLP, CHUNK], 15.7),
    (64, 8192, [ALONE, MLP, "learn.logprob_chunk=2048"], 16.5),
    (64, 8192, [ALONE, "learn.recompute=selective"], 25.5),
    (64, 8192, [ALONE, MLP, CHUNK, *EIGHT_BITS], 12.8),
    (64, 16384, [ALONE, FULL, CHUNK], 14.7),
    (64, 8192, [ALONE, FULL, CHUNK], 13.6),
    (64, 4096, [ALONE, MLP, CHUNK], 14.3),
    (64, 16384, ["learn.logprob_chunk=8192"], 45.5),
]
# Before a layer was one graph and logits were cut by words, both of which save: at most these, and not far below.
EARLIER = [
    (64, 16384, [ALONE, "learn.logprob_chunk=8192"], 50.5),
    (64, 32768, [ALONE, FULL], 19.9),
    (64, 32768, [FULL], 20.0),
    (16, 32768, [ALONE, FULL, "learn.recompute_every=2"], 41.8),
    (16, 16384, [ALONE], 45.2),
    (16, 32768, [ALONE], 64.3),
    (16, 32768, [], 67.5),
    (64, 16384, [ALONE, "learn.recompute=mlp"], 25.5),
    (64, 16384, [ALONE, "learn.recompute=selective"], 40.6),
    (64, 8192, [ALONE, "learn.recompute=mlp", "learn.logprob_chunk=2048"], 18.8),
    (64, 32768, [ALONE, "learn.recompute=mlp", "learn.logprob_chunk=8192"], 37.7),
    (64, 16384, ["learn.recompute=mlp"], 25.4),
    (64, 4096, [ALONE, "learn.logprob_chunk=1024"], 21.0),
    (64, 4096, [ALONE, "learn.recompute=selective", "learn.logprob_chunk=1024"], 19.2),
    (64, 4096, [ALONE, "learn.recompute=mlp", "learn.logprob_chunk=1024"], 15.6),
    (64, 16384, [ALONE, FULL, "learn.logprob_chunk=1024"], 15.1),
    (64, 8192, [ALONE, "learn.recompute=mlp", "learn.logprob_chunk=1024"], 17.6),
    (64, 8192, [ALONE, FULL, "learn.logprob_chunk=1024"], 14.3),
    (16, 16384, [ALONE, "learn.master=float32"], 59.5),
    (16, 16384, [ALONE, "learn.master=stochastic", "learn.moments=int8"], 42.3),
    (16, 16384, [ALONE, "learn.optimizer_on_host=true", "learn.moments=float32"], 39.4),
    (16, 16384, [ALONE, "learn.optimizer=muon"], 46.1),
    (16, 16384, [ALONE, "learn.lora_rank=16"], 35.8),
    (16, 16384, [ALONE, "learn.lora_rank=16", FULL], 9.0),
    (16, 16384, [ALONE, "learn.lora_rank=16", "learn.dora=true"], 39.8),
]
LONG = [(16384, 14.2), (32768, 15.8), (65536, 20.0), (131072, 30.8)]  # one sequence of so many tokens


def on_device(shape: ModelShape, groups: int, each: int, response: int, tokens: int, *learn: str) -> float:
    """GiB, without the rollout's cache: none was there."""
    settings = ["model.dtype=bfloat16", f"train.samples_per_prompt={each}", f"train.prompts_per_step={groups}"]
    settings += ["data.max_prompt_tokens=256", f"rollout.max_new_tokens={response}"]
    settings += [f"train.tokens_per_microbatch={tokens}", *learn]
    found = memory(recipe.load({}, settings).config, shape, on_accelerator=True)
    return (found.total - found.cache) / GIB


def needed(*overrides: str) -> MemoryEstimate:
    config = recipe.load({}, overrides).config
    found = memory(config, shape_of(config.model))
    assert found is not None
    return found


@pytest.mark.parametrize(("groups", "tokens", "learn", "peak"), MEASURED)
def test_the_estimate_is_near_peaks_measured_on_a_device(groups, tokens, learn, peak):
    assert on_device(QWEN_1_5B, groups, 8, 512, tokens, *learn) == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize(("groups", "tokens", "learn", "peak"), EARLIER)
def test_the_estimate_is_below_peaks_of_code_that_took_more(groups, tokens, learn, peak):
    assert 0.79 * peak < on_device(QWEN_1_5B, groups, 8, 512, tokens, *learn) < 1.03 * peak


def test_the_estimate_is_within_a_tenth_of_a_peak_with_8_bit_products():
    found = on_device(QWEN_1_5B, 16, 8, 512, 16384, ALONE, "learn.fp8=tensorwise")
    assert found == pytest.approx(37.2, rel=0.1)


def test_the_estimate_counts_what_an_update_in_many_passes_takes_and_none_of_it_for_one_in_place():
    # Measured with the update in many passes, when its temporaries were the peak.
    small = [ALONE, "learn.recompute=mlp", "learn.logprob_chunk=1024", "learn.master=stochastic", "learn.moments=int8"]
    fused = on_device(QWEN_1_5B, 64, 8, 512, 8192, *small)
    learn = recipe.load({}, ["model.dtype=bfloat16", *small]).config.learn
    weights, largest = QWEN_1_5B.parameters, QWEN_1_5B.vocabulary * QWEN_1_5B.hidden
    state = weights * (2 + 2 + optimizer_bytes(learn, 2))
    plain = (state + largest * update_bytes(learn, 2, is_fused=False)) / GIB
    assert plain == pytest.approx(16.6, rel=0.05)
    assert fused < 15.5


@pytest.mark.parametrize(("tokens", "peak"), LONG)
def test_the_estimate_is_near_the_peak_of_one_long_sequence(tokens, peak):
    assert on_device(QWEN_1_5B, 1, 1, tokens - 256, tokens, FULL) == pytest.approx(peak, rel=0.02)


def test_the_estimate_is_near_the_peaks_of_larger_models():
    host = ["learn.optimizer_on_host=true", "learn.master=float32", "learn.moments=float32"]
    assert on_device(QWEN_7B, 8, 8, 512, 16384, ALONE, FULL, *host) == pytest.approx(49.9, rel=0.02)
    adapters = ["learn.lora_rank=16", "learn.moments=float32"]
    assert on_device(QWEN_32B, 4, 8, 512, 16384, ALONE, FULL, *adapters) == pytest.approx(75.3, rel=0.02)


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
    guess = activation_bytes(shape_of(ModelSettings(tiny=tiny)), tokens, 4, Learn(), is_compiled=False)
    assert 0.75 < guess / measured < 1.35, f"estimated {guess:,}, measured {measured:,}"


def test_a_reference_model_and_a_critic_are_counted():
    assert needed().reference == 0
    assert needed("algorithm.kl.coef=0.1").reference == needed("algorithm=dpo").reference == needed().weights
    assert needed("algorithm.kl.coef=0.1", "learn.lora_rank=4").reference == 0  # the same model, adapters off
    assert needed().critic == 0
    assert needed("algorithm=ppo").critic == 4 * needed().weights
    assert needed("algorithm=reward_model").critic == needed().weights  # beside the model that it began as


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
    assert on_host("rollout.cache_on_host_gb=2.5") == 2_500_000_000


def test_the_cache_of_evicted_samples_is_counted_where_the_host_is_the_device():
    assert needed("rollout.cache_on_host_gb=2").host_cache == 2_000_000_000
    apart = ["cluster.executor=processes", "cluster.placement.rollout=separated", "cluster.rollouts=3"]
    assert needed("rollout.cache_on_host_gb=2", *apart).host_cache == 6_000_000_000
    assert needed().host_cache == 0


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
    shape = shape_of(plain.model)
    assert memory(apart, shape).copies == 2 * memory(plain, shape).weights
    assert memory(plain, shape).copies == 0


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize(
    "learn",
    [
        {},
        {"master": "float32"},
        {"moments": "int8", "master": "stochastic"},
        {"optimizer": "muon", "ema": 0.9},
        {"lora_rank": 4},
        {"lora_rank": 4, "ema": 0.9, "moments": "float32"},
    ],
    ids=str,
)
def test_the_estimate_of_a_checkpoint_is_near_what_is_saved(algorithm, learn):
    tiny = TinyModel(hidden=64, layers=3, heads=4, kv_heads=2, intermediate=192, window=64)
    given = {"algorithm": algorithm, "learn": learn, "model": {"tiny": tiny.model_dump(), "dtype": "bfloat16"}}
    config = Config.model_validate(given)
    model = make_tiny(tiny, torch.bfloat16, 0, torch.device("cpu")).model
    learners = [ValueLearner(ValueModel(model), config, get("ppo"), 1)] if algorithm == "ppo" else []
    saved = 0
    for learner in [*learners, Learner(model, config, get(algorithm), 1)]:
        learner.update()
        saved += sum(tensor.nbytes for tensor in learner.state()[0].values())
    assert checkpoint_bytes(config, shape_of(config.model)) == pytest.approx(saved, rel=0.1)
