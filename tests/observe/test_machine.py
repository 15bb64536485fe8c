"""The machine's metrics: right where sensors can be read, left out where they cannot, and cheap."""

import time

import pytest

from tidemill.observe.machine import Look, Nvml, Rapl, Sampler, Work, nvml


class Fake:
    """Devices with given readings; `counts` is the energy counter at each asking."""

    def __init__(self, looks, counts=()) -> None:
        self._looks, self.counts = looks, list(counts)

    def looks(self):
        return self._looks

    def energy_j(self):
        return self.counts.pop(0) if self.counts else None

    def close(self) -> None: ...


def rapl(root, energy: int, whole: int = 1000):
    domain = root / "intel-rapl:0"
    domain.mkdir(exist_ok=True)
    for name, value in (("name", "package-0"), ("energy_uj", energy), ("max_energy_range_uj", whole)):
        (domain / name).write_text(f"{value}\n")


def measured(sampler: Sampler, **work):
    try:
        return sampler.measure(Work(**({"seconds": 2.0, "tokens": 100.0} | work)))
    finally:
        sampler.close()


def test_power_utilisation_memory_and_energy_are_by_device():
    one, other = Look(300.0, 0.5, 7e9, 60.0), Look(100.0, 0.1, 1e9, 40.0)
    found = measured(Sampler(Fake([one, other], counts=(1000.0, 1400.0))))
    assert found["machine/power_w/0"] == 300.0 and found["machine/utilisation/1"] == pytest.approx(0.1)
    assert found["machine/device_memory_used/0"] == 7e9 and found["machine/temperature_c/1"] == 40.0
    assert found["machine/energy_device_j"] == 400.0 and found["machine/joules_per_token"] == 4.0


def test_without_a_counter_energy_is_mean_power_times_seconds():
    found = measured(Sampler(Fake([Look(power_w=300.0), Look(power_w=100.0)])))
    assert found["machine/energy_device_j"] == 800.0


def test_what_is_unknown_is_left_out():
    found = measured(Sampler(None))
    assert set(found) == {"machine/host_memory_peak"} and found["machine/host_memory_peak"] > 1e6
    assert set(measured(Sampler(Fake([Look()])))) == {"machine/host_memory_peak"}


def test_mfu_counts_two_operations_a_token_rolled_and_six_a_token_learned():
    work = {"rolled_tokens": 100.0, "learned_tokens": 50.0, "parameters": 1000, "peak_flops": 1e6}
    assert measured(Sampler(None), **work)["machine/mfu"] == pytest.approx(1000 * 500 / 2e6)


def test_cost_follows_price_devices_and_time():
    found = measured(Sampler(None), price_per_hour=3.0, devices=4, run_seconds=1800.0)
    assert found["cost/so_far"] == 6.0


def test_rapl_is_read_and_its_counter_may_run_over(tmp_path):
    rapl(tmp_path, 900)
    counter = Rapl(tmp_path)
    sampler = Sampler(None, counter)
    rapl(tmp_path, 100)
    found = measured(sampler, tokens=2.0)
    assert found["machine/energy_host_j"] == pytest.approx(200e-6)
    assert found["machine/joules_per_token"] == pytest.approx(100e-6)


def test_a_machine_without_rapl_says_so(tmp_path):
    assert not Rapl(tmp_path).is_readable and Rapl(tmp_path).energy_j() is None


def test_the_thread_looks_while_the_step_runs():
    device = Fake([Look(power_w=1.0)])
    sampler = Sampler(device, look_s=0.005)
    time.sleep(0.1)
    device._looks = [Look(power_w=3.0)]
    time.sleep(0.1)
    found = measured(sampler)
    assert 1.0 < found["machine/power_w/0"] < 3.0


def test_measuring_costs_less_than_half_a_percent_of_a_second():
    sampler = Sampler(nvml(), Rapl())
    began = time.process_time()
    for _ in range(100):
        sampler.measure(Work(1.0, 1.0))
    spent = (time.process_time() - began) / 100
    sampler.close()
    assert 5 * spent < 0.005  # once by the step, four times a second by the thread


@pytest.mark.gpu
def test_nvml_counts_the_energy_that_its_power_integrates_to():
    import torch

    devices = Nvml([0])
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    sampler, began = Sampler(devices, look_s=0.05), time.perf_counter()
    while time.perf_counter() - began < 8.0:
        for _ in range(50):
            x = (x @ x).clamp(-1, 1)
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    found = sampler.measure(Work(seconds, 1000.0))
    sampler.close()
    assert found["machine/energy_device_j"] == pytest.approx(found["machine/power_w/0"] * seconds, rel=0.05)
