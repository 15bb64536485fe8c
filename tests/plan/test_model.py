"""The model of time: what it must agree with, whatever a device is: fewer devices take longer, longer samples too."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tidemill.errors import ConfigError
from tidemill.plan import calibration, features, hardware, lengths, links
from tidemill.plan.calibration import Calibration, Grid
from tidemill.plan.decoding import DecodingClock, Sample, Trunk, drain
from tidemill.plan.features import Cut
from tidemill.plan.fit import fit, off
from tidemill.plan.step_estimate import drawn, estimate, rollout_of
from tidemill.plan.time_model import TimeModel, calibration_for
from tidemill.recipe.config import Config
from tidemill.topology.tree import KINDS, Level, Topology


def config_of(**over: Any) -> Config:
    plain: dict[str, Any] = {
        "model": {"path": "qwen2.5-7b", "dtype": "bfloat16"},
        "data": {"max_prompt_tokens": 512},
        "rollout": {"max_new_tokens": 2048, "concurrent": 256},
        "train": {"prompts_per_step": 64, "samples_per_prompt": 8, "tokens_per_microbatch": 16384},
        "cluster": {"executor": "ray", "rollouts": 4},
        "learn": {"parallel": {"fsdp": 4}},
    }
    for key, value in over.items():
        plain[key] = {**plain.get(key, {}), **value} if isinstance(value, dict) else value
    return Config.model_validate(plain)


def seconds(config: Config, machines: hardware.Machines | None = None, mean: str = "256,1000") -> float:
    model = TimeModel(config, machines or hardware.cluster_of("H200", 1))
    return estimate(model, lengths.of(config, mean)).seconds


def test_coefficients_are_found_again_and_never_negative() -> None:
    rng = np.random.default_rng(3)
    true = {"a": 2.0, "b": 0.5, "c": 0.0}
    points = []
    for _ in range(40):
        cost = {name: float(rng.uniform(0.1, 5)) for name in true}
        points.append((cost, sum(true[n] * x for n, x in cost.items())))
    found = fit(points)
    assert found["a"] == pytest.approx(2.0, rel=1e-3) and found["b"] == pytest.approx(0.5, rel=1e-3)
    assert min(found.values()) >= 0 and off(points, found) < 1e-3


def test_a_grid_gives_its_own_points_back_and_stays_inside_its_bounds() -> None:
    grid = Grid((1, 16, 256), (1000, 100_000), ((0.1, 0.2), (0.4, 0.5), (0.8, 0.9)))
    assert grid.at(16, 1000) == pytest.approx(0.4) and grid.at(256, 100_000) == pytest.approx(0.9)
    assert grid.at(1e9, 1e12) == pytest.approx(0.9) and grid.at(0.01, 1) == pytest.approx(0.1)
    assert 0.4 < grid.at(64, 1000) < 0.8


def test_a_calibration_is_read_back_as_it_was_written_and_a_broken_one_is_refused(tmp_path: Any) -> None:
    made = calibration.shipped("h200.json")
    assert calibration.parse(made.dump(), "here") == made
    (tmp_path / "bad.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(ConfigError, match="no calibration"):
        calibration.load(tmp_path / "bad.json")


def test_every_shipped_calibration_says_when_and_with_which_versions_it_was_made() -> None:
    for file in calibration.SHIPPED.glob("*.json"):
        made = calibration.load(file)
        assert made.made.startswith("20") and "torch" in made.versions and made.source, file
        assert all(value >= 0 for value in made.coefficients.values())


def test_a_device_without_a_calibration_borrows_efficiencies_at_its_own_rates() -> None:
    h200, h20 = (calibration_for(hardware.SHEETS[name]) for name in ("H200", "H20"))
    assert h20.source.startswith("efficiencies of") and h20.coefficients == h200.coefficients
    assert h20.flops < h200.flops / 5 and h20.bytes_per_s == pytest.approx(h200.bytes_per_s * 4.0 / 4.8)


def test_more_of_anything_takes_longer() -> None:
    base = seconds(config_of())
    assert seconds(config_of(), mean="256,1900") > base
    assert seconds(config_of(train={"prompts_per_step": 128})) > base
    assert seconds(config_of(model={"path": "qwen2.5-32b"})) > base
    assert seconds(config_of(cluster={"rollouts": 2}, learn={"parallel": {"fsdp": 2}})) > base
    assert seconds(config_of(learn={"parallel": {"fsdp": 4}, "recompute": "full"})) > base


def test_async_is_never_slower_than_sync_by_estimate() -> None:
    config = config_of()
    ahead = config_of(flow={"schedule": "async", "max_staleness": 2})
    assert seconds(ahead) <= seconds(config)


def test_engines_that_hold_several_steps_have_fuller_slots() -> None:
    layout: dict[str, Any] = {"cluster": {"rollouts": 8}, "learn": {"parallel": {"fsdp": 8}}}
    machines = hardware.cluster_of("H200", 2)
    one, four = (config_of(**layout, flow={"schedule": "async", "max_staleness": n}) for n in (1, 4))
    own = drawn(one, lengths.of(one, "256,1000"))
    apart, together = (rollout_of(TimeModel(config, machines), own) for config in (one, four))
    assert together.rows > 2 * apart.rows and together.seconds < 0.7 * apart.seconds
    assert together.tokens == pytest.approx(apart.tokens, rel=0.15)  # of the busiest engine


def test_an_engine_makes_every_token_once_and_never_more_samples_at_once_than_slots() -> None:
    model = TimeModel(config_of(), hardware.cluster_of("H200", 1))
    rng = np.random.default_rng(1)
    groups = [(100, rng.integers(1, 400, 8).tolist()) for _ in range(20)]
    done = drain(model, groups, slots=32)
    assert done.tokens == sum(sum(r) for _, r in groups) and len(done.ends) == 160
    assert list(done.ends) == sorted(done.ends) and 0 < done.rows <= 32
    assert drain(model, groups, slots=64).seconds < done.seconds


def test_a_leap_to_a_whole_group_ends_where_single_steps_would() -> None:
    model = TimeModel(config_of(), hardware.cluster_of("H200", 1))
    rng = np.random.default_rng(2)
    groups = [(50, rng.integers(1, 300, 8).tolist()) for _ in range(6)]

    def clock() -> DecodingClock:
        made = DecodingClock(model, 64)
        for prompt, responses in groups:
            trunk = Trunk(prompt, deque(Sample(prompt, n) for n in responses))
            made.add(trunk)
        return made

    one, other = clock(), clock()
    spent = 0.0
    span = one.leap()
    one.advance(span.steps)
    while other.step < one.step:
        single = other.span()
        spent += single.seconds
        other.advance(single.steps)
    assert other.step == one.step and spent == pytest.approx(span.seconds, rel=1e-9)
    assert one.held == pytest.approx(other.held) and one.made_tokens == other.made_tokens


def test_exchanges_stay_inside_a_level_where_they_can() -> None:
    tree = Topology("two nodes", "H200", (Level("node", 8, KINDS["nvlink4"]), Level("pod", 2, KINDS["ib400"])))
    inside, across = links.all_gather_s(tree, range(8), 1e9), links.all_gather_s(tree, range(16), 1e9)
    assert inside == pytest.approx(7 / 8 * 1e9 / 450e9 + 7e-6)
    assert across == pytest.approx(inside + 0.5 * 1e9 / 8 / 50e9 + 3e-6)
    assert links.all_reduce_s(tree, [3], 1e9) == 0 and links.all_to_all_s(tree, range(16), 1e9) > 0


def test_memory_traffic_of_a_mixture_grows_with_the_experts_that_are_touched() -> None:
    made = calibration.shipped("h200.json")
    shape = replace(TimeModel(config_of(model={"path": "qwen3-30b-a3b"}), hardware.cluster_of("H200", 1)).shape)
    few, many = (features.experts_s(made, shape, tokens, 2, Cut()) for tokens in (1, 512))
    assert 5 < many / few < 200


def test_an_engine_of_several_devices_reads_all_of_its_experts() -> None:
    read = {}
    for tp in (1, 4):
        config = config_of(model={"path": "qwen3-30b-a3b"}, rollout={"tp": tp}, cluster={"rollouts": 1})
        model = TimeModel(config, hardware.cluster_of("H200", 1))
        cost = features.decode(model.made, model.shape, 512, 0.0, model.width, model.engine_cut)
        read[tp] = cost["decode.experts"]
    assert read[4] > 0.99 * read[1] / 4


@pytest.mark.parametrize("model", ["qwen3-235b-a22b", "deepseek-v3"])
def test_experts_are_never_read_faster_than_the_memory_allows(model: str) -> None:
    made = calibration.shipped("h200.json")
    shape = TimeModel(config_of(model={"path": model}), hardware.cluster_of("H200", 1)).shape
    spent = made.coefficients["decode.experts"] * features.decode(made, shape, 512, 0.0, 2, Cut())["decode.experts"]
    moved = 2 * shape.moe_layers * shape.experts * 3 * shape.hidden * shape.expert_width
    assert 0.99 < spent / (moved / made.bytes_per_s) < 4  # above the roofline, and of its order


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        ({"device": "H2000", "levels": [{"level": "node", "holds": 8, "link": "nvlink4"}]}, "not on file"),
        ({"device": "H200", "price": 3}, "no field 'price'"),
        ({"device": "H200", "price_per_hour": -1, "levels": []}, "a number from 0"),
        ([1], "a mapping is expected"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused_in_words(plain: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        hardware.parse(plain)


def test_lengths_have_the_mean_that_was_asked_for_and_never_pass_the_longest() -> None:
    drawn = lengths.of(config_of(), "100,900").draw(20_000, 5)
    assert drawn.max() <= 2048 and abs(drawn.mean() / 900 - 1) < 0.05
    assert set(lengths.of(config_of(), "full").draw(9, 1).tolist()) == {2048}
    with pytest.raises(ConfigError, match="neither a run's folder nor lengths"):
        lengths.of(config_of(), "nowhere")


def test_a_plain_calibration_of_this_processor_takes_seconds() -> None:
    from tidemill.plan.calibrate import calibrate
    from tidemill.plan.trials import tiny

    said: list[str] = []
    made = calibrate(said.append, tiny(), limit_s=60)
    assert isinstance(made, Calibration) and made.flops > 1e8 and made.bytes_per_s > 1e8
    assert {name.split(".")[0] for name in made.coefficients} == {"decode", "prefill", "learn", "update"}
    assert said[-1].startswith("took")
