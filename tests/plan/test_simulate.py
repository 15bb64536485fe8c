"""The simulator drives the real driver and ledger: what is promised of a run holds in virtual time too."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from tests.plan.test_model import config_of
from tidemill.cluster.driver import conductor
from tidemill.plan import hardware, lengths
from tidemill.plan.lengths import Lengths
from tidemill.plan.simulate.failures import Faults
from tidemill.plan.simulate.kernel import Kernel, Task
from tidemill.plan.simulate.run import Simulation, simulate
from tidemill.plan.simulate.shared import Share
from tidemill.plan.step_estimate import estimate
from tidemill.plan.time_model import TimeModel


def simulated(steps: int = 4, faults: Faults | None = None, mean: str = "256,600", **over: Any) -> Simulation:
    config = config_of(train={"prompts_per_step": 32}, **over)
    model = TimeModel(config, hardware.cluster_of("H200", 2))
    return simulate(model, lengths.of(config, mean), steps=steps, faults=faults, seed=1)


def test_every_step_learns_from_every_sample_once() -> None:
    for schedule in ("sync", "streamed", "async"):
        found = simulated(flow={"schedule": schedule})
        assert [s.step for s in found.steps] == [1, 2, 3, 4]
        assert {s.measured["learned_samples"] for s in found.steps} == {256.0}, schedule
        assert found.goodput > 0.97 and not found.rewinds


def test_streamed_and_async_hide_work_behind_the_tail() -> None:
    seconds = {name: simulated(flow={"schedule": name}).step_s() for name in ("sync", "streamed", "async")}
    assert seconds["streamed"] < seconds["sync"] and seconds["async"] < seconds["streamed"]


@pytest.mark.parametrize("staleness", [1, 4])
def test_the_estimate_of_async_agrees_with_the_simulator(staleness: int) -> None:
    layout: dict[str, Any] = {"cluster": {"rollouts": 8}, "learn": {"parallel": {"fsdp": 24}}}
    config = config_of(**layout, flow={"schedule": "async", "max_staleness": staleness}, train={"prompts_per_step": 32})
    model, own = TimeModel(config, hardware.cluster_of("H200", 4)), Lengths(256, 1000, 2048, 0.3)
    steps = simulate(model, own, steps=13, seed=1).steps[3:]
    assert estimate(model, own).seconds == pytest.approx(sum(s.seconds for s in steps) / len(steps), rel=0.2)


def test_no_sample_is_older_than_the_schedule_allows() -> None:
    found = simulated(8, flow={"schedule": "async", "max_staleness": 2})
    ages = [s.measured["staleness_max"] for s in found.steps]
    assert max(ages) <= 2 and max(ages) >= 1


def test_a_run_with_dying_workers_makes_every_step_and_loses_time() -> None:
    whole = simulated(12)
    broken = simulated(12, Faults(mtbf_hours=0.15, restart_s=20, seed=4))
    assert broken.lost > 0 and [s.step for s in broken.steps] == list(range(1, 13))
    assert {s.measured["learned_samples"] for s in broken.steps} == {256.0}
    assert broken.seconds > whole.seconds and broken.goodput < whole.goodput


def test_slow_devices_and_long_tails_cost_what_they_should() -> None:
    base = simulated()
    assert simulated(faults=Faults(slow_share=0.3, slow_factor=2.0, seed=2)).step_s() > base.step_s()
    config = config_of(train={"prompts_per_step": 32})
    model = TimeModel(config, hardware.cluster_of("H200", 2))
    even, tail = (simulate(model, Lengths(256, 600, 2048, sigma), steps=3, seed=1).step_s() for sigma in (0.0, 1.0))
    assert tail > even


def test_the_same_seed_gives_the_same_times() -> None:
    first, again = (simulated(faults=Faults(spread=0.1)) for _ in range(2))
    assert [s.end for s in first.steps] == [s.end for s in again.steps]


def test_colocated_ranks_take_turns() -> None:
    found = simulated(cluster={"placement": "colocated"}, learn={"parallel": {"fsdp": 8}})
    assert {s.measured["learned_samples"] for s in found.steps} == {256.0}


def test_a_thousand_devices_take_seconds() -> None:
    config = config_of(
        model={"path": "qwen2.5-32b"},
        train={"prompts_per_step": 128, "samples_per_prompt": 16},
        rollout={"tp": 8},
        cluster={"rollouts": 96},
        learn={"parallel": {"fsdp": 32, "tp": 8}},
    )
    model = TimeModel(config, hardware.cluster_of("H200", 128))
    found = simulate(model, lengths.of(config, "256,600"), steps=2)
    assert model.devices == 1024 and len(found.steps) == 2 and found.took_s < 60


@pytest.mark.parametrize("schedule", ["streamed", "async"])
def test_steps_take_the_same_however_often_the_driver_looks_at_the_dock(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = simulated(flow={"schedule": schedule})
    monkeypatch.setattr(conductor, "MANY", 1)  # as rarely as with thousands of workers for each that is here
    seldom = simulated(flow={"schedule": schedule})
    assert [s.end for s in seldom.steps] == pytest.approx([s.end for s in often.steps], abs=1e-9)


def test_python_looks_for_garbage_as_before_when_a_simulation_is_over() -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    simulated(1)
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def test_tasks_that_share_a_core_take_as_long_as_their_work_together() -> None:
    kernel = Kernel()
    core = Share(kernel, 1)
    ended: dict[str, float] = {}

    def task(name: str, amount: float) -> None:
        def body() -> None:
            core.work(tasks[name], amount)
            ended[name] = kernel.time

        tasks[name] = Task(kernel, body, lambda error: pytest.fail(str(error)))

    tasks: dict[str, Task] = {}
    task("short", 1.0)
    task("long", 3.0)
    kernel.run(100.0, lambda: False)
    assert ended == {"short": pytest.approx(2.0), "long": pytest.approx(4.0)} and kernel.time == 100.0


def test_an_interrupted_task_gives_what_is_left() -> None:
    kernel = Kernel()
    core = Share(kernel, 1)
    left: list[float] = []
    task = Task(kernel, lambda: left.append(core.work(task, 5.0, True)), lambda error: pytest.fail(str(error)))
    kernel.at(2.0, task.wake)
    kernel.run(10.0, lambda: False)
    assert left == [pytest.approx(3.0)]


def test_a_recipe_that_asks_for_more_devices_than_the_cluster_has_is_refused_before_simulating() -> None:
    from tidemill.cli.simulate import check_devices
    from tidemill.errors import ConfigError

    config = config_of()
    check_devices(TimeModel(config, hardware.cluster_of("H200", 1)))
    with pytest.raises(ConfigError, match=r"asks for 8 devices, and .* has 4"):
        check_devices(TimeModel(config, hardware.cluster_of("H200", 1, 4)))
