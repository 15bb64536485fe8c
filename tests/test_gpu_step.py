"""What the accelerator benchmark works out of its samples."""

import pytest
from benchmarks import gpu_step


class Sampled(gpu_step.Power):
    def __init__(self, samples):
        self.samples = samples


def test_energy_is_the_area_under_sampled_power():
    power = Sampled([(0.0, 100.0), (1.0, 100.0), (2.0, 300.0), (3.0, 300.0), (9.0, 500.0)])
    assert power.joules(1.0, 3.0) == pytest.approx(200 + 300)
    assert power.joules(0.5, 3.5) == pytest.approx(50 + 200 + 300 + 150)
    assert power.joules(20.0, 30.0) is None


def test_figures_leave_the_warm_up_out():
    laps = [
        {"start": 0.0, "end": 10.0, "tokens": 100.0, "rollout_s": 8.0},
        {"start": 10.0, "end": 12.0, "tokens": 100.0, "rollout_s": 1.0},
        {"start": 12.0, "end": 16.0, "tokens": 200.0, "rollout_s": 3.0},
    ]
    power = Sampled([(t / 2, 10.0) for t in range(40)])
    found = gpu_step.figures({"laps": laps, "peak_gib": 3.0}, {"warmup": 1}, power)
    assert found["tokens_per_s"] == pytest.approx(50) and found["step_s"] == 3.0
    assert found["parts_s"] == {"rollout": 2.0} and found["first_step_s"] == 10.0
    assert found["joules_per_token"] == pytest.approx(60 / 300)


def test_a_system_that_failed_keeps_its_reason():
    assert gpu_step.figures({"error": "out of memory"}, {"warmup": 1}, Sampled([]))["error"] == "out of memory"
