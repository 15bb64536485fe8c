"""What is handed over: no more than the memory estimate asks for, and nothing where no turns are taken."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.check.test_memory import GIB, QWEN_7B

from tidemill.check import precheck
from tidemill.device import DeviceMemory
from tidemill.estimate import handover as turns
from tidemill.estimate.memory import memory
from tidemill.estimate.ranks_memory import engine_share, per_rank
from tidemill.recipe import load as recipe
from tidemill.recipe.config import ModelSettings
from tidemill.rollout.native.ranks.grid import Grid


def config(*overrides: str) -> Any:
    return recipe.load({"model": {"dtype": "bfloat16"}, "learn": {"recompute": "full"}}, list(overrides)).config


@dataclass(frozen=True)
class Device:
    free: int
    kind: str = "cuda"

    def memory(self) -> DeviceMemory:
        return DeviceMemory(free=self.free, total=self.free, reserved=0)


def test_the_peak_is_the_larger_phase_and_falls_with_all_that_is_handed_over() -> None:
    needed = memory(config("rollout.cache_tokens=800000"), QWEN_7B, on_accelerator=True)
    assert needed is not None
    never, cache, everything = (turns.peak(needed, what) for what in turns.OPTIONS)
    assert never == needed.total
    assert cache == max(needed.total - needed.cache, needed.weights + needed.optimizer + needed.cache)
    assert everything == max(needed.total - needed.cache, needed.weights + needed.cache)
    assert never > cache > everything
    assert turns.host_bytes(needed, "all") == needed.optimizer and turns.host_bytes(needed, "cache") == 0


def test_the_running_mean_of_the_weights_stays_on_the_device() -> None:
    plain, averaged = (
        memory(config("rollout.cache_tokens=2000000", *more), QWEN_7B, on_accelerator=True)
        for more in ((), ("learn.ema=0.9",))
    )
    assert plain is not None and averaged is not None and averaged.mean > 0
    for what in turns.OPTIONS:
        assert turns.peak(averaged, what) - turns.peak(plain, what) == averaged.mean


def test_the_least_that_fits_is_chosen() -> None:
    needed = memory(config("rollout.cache_tokens=800000"), QWEN_7B, on_accelerator=True)
    assert needed is not None
    peaks = {what: turns.peak(needed, what) for what in turns.OPTIONS}
    for what in turns.OPTIONS:
        assert turns.least(peaks, int(peaks[what] / turns.FITS) + 1) == what
    assert turns.least(peaks, GIB) == "all"
    assert turns.least({}, GIB) == "never"


def test_a_small_model_pays_nothing_and_a_device_that_is_too_small_gets_all() -> None:
    own = config()
    assert turns.chosen(own, own.model, Device(100 * GIB)) == "never"  # type: ignore[arg-type]
    assert turns.chosen(own, own.model, Device(1 << 20)) == "all"  # type: ignore[arg-type]


def test_on_the_host_itself_nothing_is_handed_over_unless_asked() -> None:
    own = config()
    assert turns.chosen(own, own.model, Device(1, "cpu")) == "never"  # type: ignore[arg-type]
    asked = config("flow.hand_over=cache")
    assert turns.chosen(asked, asked.model, Device(1, "cpu")) == "cache"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "overrides",
    [
        ["flow.schedule=streamed"],
        ["flow.placement=separated"],
        ["cluster.executor=processes"],
    ],
    ids=["streamed", "separated", "workers of their own"],
)
def test_who_takes_no_turns_hands_nothing_over_and_is_refused_when_asked_to(overrides: list[str]) -> None:
    own = config(*overrides)
    assert turns.chosen(own, own.model, Device(1 << 20)) == "never"  # type: ignore[arg-type]
    assert not any("hand_over" in p for p in precheck.problems(own, ModelSettings()))
    asked = config(*overrides, "flow.hand_over=all")
    assert any(p.startswith("flow.hand_over is all, but") for p in precheck.problems(asked, ModelSettings()))


def test_colocated_workers_take_turns() -> None:
    own = config("cluster.executor=processes", "cluster.placement=colocated")
    assert turns.are_taken(own)
    assert turns.chosen(own, own.model, Device(1 << 20)) == "all"  # type: ignore[arg-type]


def test_a_rank_of_a_cut_learner_gives_the_device_away_and_gets_it_back() -> None:
    own = config("learn.parallel.fsdp=4", "rollout.cache_tokens=800000")
    sizes = replace(QWEN_7B, parameters=None)
    learner = per_rank(own, sizes, on_accelerator=True)
    held = learner.weights + learner.optimizer + learner.reference + learner.critic + learner.mean
    assert [turns.at_rest(learner, what) for what in turns.OPTIONS] == [learner.total, held, 0]
    copy, cache = engine_share(own, sizes, Grid())
    never, cached, everything = (turns.rank_peak(learner, copy, cache, what, True) for what in turns.OPTIONS)
    assert never == copy + cache + learner.total and cached == max(copy + held + cache, copy + learner.total)
    assert everything == max(copy + cache, learner.total, copy + held) < cached < never
    graphs_stay = turns.rank_peak(learner, copy, cache, "all", False)  # those of a whole engine hold its addresses
    assert graphs_stay == max(copy + cache, copy + learner.total)
