"""The machines' metrics: right where sensors can be read, left out where they cannot, and cheap."""

import shutil
import subprocess
import time

import pytest

from tidemill.observe import machine, sensors
from tidemill.observe.machine import Readings, Sampler, combined
from tidemill.observe.sensors import Dcmi, Look, Nvml, Rapl, open_devices, visible


class Fake:
    """Devices with given readings; `counts` is the energy counter of each at every asking."""

    def __init__(self, looks, counts=()) -> None:
        self._looks, self.counts = looks, list(counts)
        self.names = [f"device-{i}" for i in range(len(looks))]

    def looks(self):
        return self._looks

    def energies_j(self):
        return self.counts.pop(0) if self.counts else [None] * len(self._looks)

    def close(self) -> None: ...


def rapl(root, energy: int, whole: int = 1000):
    domain = root / "intel-rapl:0"
    domain.mkdir(exist_ok=True)
    for name, value in (("name", "package-0"), ("energy_uj", energy), ("max_energy_range_uj", whole)):
        (domain / name).write_text(f"{value}\n")


def measured(sampler: Sampler) -> dict[str, float]:
    try:
        return combined(sampler.readings(), "here", {})
    finally:
        sampler.close()


def test_power_utilisation_memory_and_energy_are_by_device():
    one, other = Look(300.0, 0.5, 7e9, 60.0), Look(100.0, 0.1, 1e9, 40.0)
    found = measured(Sampler(Fake([one, other], counts=([1000.0, 50.0], [1400.0, 60.0]))))
    assert found["machine/power_w/0"] == 300.0 and found["machine/utilisation/1"] == pytest.approx(0.1)
    assert found["machine/device_memory_used/0"] == 7e9 and found["machine/temperature_c/1"] == 40.0
    assert found["machine/energy_device_j"] == 410.0


def test_without_a_counter_energy_is_mean_power_times_seconds():
    began = time.perf_counter()
    sampler = Sampler(Fake([Look(power_w=300.0), Look(power_w=100.0)]))
    time.sleep(0.1)
    found = measured(sampler)
    assert 40.0 <= found["machine/energy_device_j"] <= 400.0 * (time.perf_counter() - began)


def test_what_is_unknown_is_left_out(monkeypatch):
    monkeypatch.setattr(machine, "network_bytes", lambda: None)
    found = measured(Sampler(None))
    assert set(found) == {"machine/host_memory_peak"} and found["machine/host_memory_peak"] > 1e6
    assert set(measured(Sampler(Fake([Look()])))) == {"machine/host_memory_peak"}


def test_a_step_begins_anew():
    sampler = Sampler(Fake([Look()], counts=([0.0], [500.0], [560.0])))
    sampler.begin()
    assert measured(sampler)["machine/energy_device_j"] == 60.0


def told(device: str, joules: float | None, host: dict[str, float] | None = None) -> Readings:
    return Readings({device: {"power_w": 1.0} | ({} if joules is None else {"energy_j": joules})}, host or {})


def test_machines_are_added_up_and_a_shared_device_counts_once():
    workers = {
        "learner-0": ("a", told("gpu-1", 5.0, {"network_bytes": 9.0})),
        "rollout-0": ("a", told("gpu-1", 5.0, {"network_bytes": 9.0})),
        "rollout-1": ("b", told("gpu-1", 7.0, {"network_bytes": 2.0})),
        "reward-0": ("b", Readings({}, {"network_bytes": 2.0})),
    }
    found = combined(Readings({}, {"network_bytes": 1.0, "host_memory_peak": 3.0}), "a", workers)
    assert found == {
        "machine/power_w/learner-0": 1.0,
        "machine/power_w/rollout-1": 1.0,
        "machine/energy_device_j": 12.0,
        "machine/network_bytes": 3.0,
        "machine/host_memory_peak": 3.0,
    }


def test_a_sum_that_lacks_a_device_or_a_machine_is_not_given():
    workers = {"learner-0": ("a", told("gpu-1", 5.0)), "rollout-0": ("b", told("gpu-2", None))}
    found = combined(Readings({}, {"energy_host_j": 1.0}), "a", workers)
    assert "machine/energy_device_j" not in found and "machine/energy_host_j" not in found


def test_rapl_is_read_and_its_counter_may_run_over(tmp_path):
    rapl(tmp_path, 900)
    sampler = Sampler(None, Rapl(tmp_path))
    rapl(tmp_path, 100)
    assert measured(sampler)["machine/energy_host_j"] == pytest.approx(200e-6)


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


def test_reading_costs_less_than_half_a_percent_of_a_second():
    sampler = Sampler(open_devices("cuda"), Rapl())
    began = time.process_time()
    for _ in range(100):
        sampler.begin()
        sampler.readings()
    spent = (time.process_time() - began) / 100
    sampler.close()
    assert 5 * spent < 0.005  # once by the step, four times a second by the thread where there are devices


def test_only_the_devices_that_the_environment_names_are_read(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-8f")
    assert visible("cuda") == ["3", "GPU-8f"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible("cuda") == []


NPUS = """
#include <string.h>
int dcmi_init(void) { return 0; }
int dcmi_get_card_list(int *n, int *cards, int room) { *n = 2; cards[0] = 0; cards[1] = 4; return 0; }
int dcmi_get_device_num_in_card(int card, int *n) { *n = card ? 2 : 1; return 0; }
int dcmi_get_device_power_info(int card, int device, int *deciwatts) { *deciwatts = 3005 + card; return 0; }
int dcmi_get_device_utilization_rate(int card, int device, int kind, unsigned *percent) {
  *percent = 40 + device; return kind == 2 ? 0 : -1;
}
int dcmi_get_device_temperature(int card, int device, int *degrees) { *degrees = 51; return card ? -8255 : 0; }
struct hbm { unsigned long long size; unsigned freq; unsigned long long usage; int temp; unsigned rate; };
int dcmi_get_device_hbm_info(int card, int device, struct hbm *to) {
  memset(to, 0, sizeof *to); to->size = 65536; to->usage = 1024; return 0;
}
"""


@pytest.fixture
def npus(tmp_path):
    """A library that answers as Ascend's driver does, for a card of one device and one of two."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "dcmi.c").write_text(NPUS)
    library = tmp_path / "libdcmi.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "dcmi.c"], check=True)
    return str(library)


def test_ascend_devices_are_read_through_their_drivers_library(npus, monkeypatch):
    devices = Dcmi(library=npus)
    assert devices.names == ["0-0", "4-0", "4-1"]
    first, _, last = devices.looks()
    assert first == Look(pytest.approx(300.5), pytest.approx(0.4), 2.0**30, 51.0)
    assert last == Look(pytest.approx(300.9), pytest.approx(0.41), 2.0**30, None)
    assert devices.energies_j() == [None, None, None]
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "2,0")
    assert Dcmi([0], library=npus).names == ["4-1"]


def test_devices_without_a_driver_are_none(monkeypatch):
    monkeypatch.setattr(sensors, "DCMI", ("libdcmi-that-is-not-here.so",))
    assert open_devices("npu") is None and open_devices("cpu") is None


@pytest.mark.gpu
def test_nvml_counts_the_energy_that_its_power_integrates_to():
    """From idle to idle: a sensor that lags misses as much of the end as it got too much of at the beginning."""
    import torch

    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    (x @ x).sum().item()
    time.sleep(2.0)
    sampler, began = Sampler(Nvml([0]), look_s=0.02), time.perf_counter()
    time.sleep(1.0)
    while time.perf_counter() - began < 8.0:
        for _ in range(50):
            x = (x @ x).clamp(-1, 1)
        torch.cuda.synchronize()
    time.sleep(2.0)
    seconds = time.perf_counter() - began
    found = measured(sampler)
    assert found["machine/energy_device_j"] == pytest.approx(found["machine/power_w/0"] * seconds, rel=0.03)
