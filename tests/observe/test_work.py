"""Shares of a device's rates by stage: worked out by hand for a model of known sizes."""

import pytest

from tidemill.recipe import load as recipes
from tidemill.run.work import STEPS, active_parameters, device_seconds, shares, work_of

RECIPE = {
    "model": {"tiny": {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 64, "window": 64}},
    "data": {"source": "arithmetic", "held_out": 8, "max_prompt_tokens": 16},
    "train": {"prompts_per_step": 4, "samples_per_prompt": 4},
    "algorithm": "grpo",
}
N = 1000
# 16 samples, of which each has 10 tokens of prompt and 5 of its own
MEASURED = {
    "prompt_tokens": 160.0, "made_tokens": 80.0, "response_tokens": 5.0, "learned_tokens": 240.0,
    "learned_samples": 16.0,
    "time/rollout": 2.0, "time/learn": 4.0, "time/reference": 1.0, STEPS: 5.0,
}  # fmt: skip


class Rates:
    flops, bytes_per_s = 1e4, 1e5


def config(**more):
    return recipes.load({**RECIPE, **more}).config


def test_a_shared_prompt_is_computed_once():
    work = work_of(config(), None, N, MEASURED)
    assert work["rollout"].flops == 2 * N * (40 + 80) and work["rollout"].nbytes == 5 * N * 4
    assert work["learn"].flops == 6 * N * (40 + 80) and work["reference"].flops == 2 * N * (40 + 80)
    alone = work_of(config(learn={"share_prompts": False}), None, N, MEASURED)
    assert alone["learn"].flops == 6 * N * 240


def test_adapters_spare_the_gradients_of_weights():
    assert work_of(config(learn={"lora_rank": 4}), None, N, MEASURED)["learn"].flops == 4 * N * 120


def test_the_cache_that_decoding_reads_counts_too():
    from tidemill.models.shape import shape_of

    made = config()
    shape = shape_of(made.model)
    read = work_of(made, shape, N, MEASURED)["rollout"].nbytes - 5 * N * 4
    assert read == 80 * (10 + 2.5) * 2 * 2 * 1 * 16 * 4  # tokens × (before) × layers × (k, v) × heads × dim × bytes


def test_a_mixture_computes_with_the_experts_that_are_visited():
    from dataclasses import replace

    from tidemill.models.shape import shape_of

    dense = shape_of(config().model)
    mixture = replace(dense, experts=8, experts_per_token=2, expert_width=16)
    asleep = 2 * 3 * 32 * 16 * 8 * 0.75
    assert active_parameters(mixture, 100_000) == 100_000 - asleep


def test_shares_are_of_the_data_sheet_and_of_what_was_measured():
    made = config()
    found = shares(made, work_of(made, None, N, MEASURED), MEASURED, 1e6, Rates())
    assert found["machine/mfu/learn"] == pytest.approx(6 * N * 120 / (4.0 * 1e6))
    assert found["machine/roofline/learn"] == pytest.approx(6 * N * 120 / 1e4 / 4.0)
    assert found["machine/roofline/rollout"] == pytest.approx(2 * N * 120 / 1e4 / 2.0)
    memory_bound = shares(made, work_of(made, None, N, MEASURED | {STEPS: 5000.0}), MEASURED, 0.0, Rates())
    assert memory_bound["machine/roofline/rollout"] == pytest.approx(5000 * N * 4 / 1e5 / 2.0)
    assert not any("mfu" in name for name in memory_bound)


def test_unknown_rates_give_no_shares():
    made = config()
    assert shares(made, work_of(made, None, N, MEASURED), MEASURED, 0.0, None) == {}


def test_ranks_of_one_process_count_the_stages_seconds_once_each():
    cut = config(learn={"parallel": {"fsdp": 2}})
    assert device_seconds(cut, "learn", MEASURED) == 8.0 and device_seconds(cut, "rollout", MEASURED) == 2.0
    apart = config(learn={"parallel": {"fsdp": 2}}, cluster={"executor": "processes"})
    assert device_seconds(apart, "learn", MEASURED) == 4.0
