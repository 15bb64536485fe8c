import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from tidemill import device
from tidemill.device import accelerator, cuda, host
from tidemill.device.api import Device
from tidemill.device.ascend import npu
from tidemill.device.ascend import settings as npu_settings
from tidemill.device.ascend import smi as npu_smi
from tidemill.errors import ConfigError
from tidemill.imports import WORKER
from tidemill.plan import hardware

GB = 10**9


class StandInBackend(types.ModuleType):
    """The part of torch.npu's public interface that is used, over a machine with two devices."""

    def __init__(self) -> None:
        super().__init__("torch.npu")
        self.synchronized: list[int] = []
        self.seeds: list[int] = []

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def get_device_name(self, index: int) -> str:
        return "Ascend910B3"

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 60 * GB, 64 * GB

    def memory_reserved(self, index: int) -> int:
        return 3 * GB

    def synchronize(self, index: int) -> None:
        self.synchronized.append(index)

    def manual_seed_all(self, seed: int) -> None:
        self.seeds.append(seed)

    def is_bf16_supported(self) -> bool:
        return True


@pytest.fixture
def ascend(monkeypatch) -> StandInBackend:
    """torch_npu as it shows itself: importing it adds `torch.npu`."""
    backend = StandInBackend()
    package = types.ModuleType("torch_npu")
    monkeypatch.setitem(sys.modules, "torch_npu", package)
    monkeypatch.setattr(torch, "npu", backend, raising=False)
    return backend


def check_contract(subject: Device) -> None:
    assert subject.kind in device.KINDS
    assert subject.torch_device.type == subject.kind
    assert subject.name
    memory = subject.memory()
    assert 0 < memory.free <= memory.total
    assert memory.reserved >= 0
    subject.synchronize()
    subject.seed(3)
    assert subject.supports("float32")
    assert not subject.supports("float7")
    peak = subject.peak()
    assert peak is None or (peak.flops > 0 and peak.bytes_per_s > 0)
    watts = subject.power_w()
    assert watts is None or watts > 0


def test_the_cpu_keeps_the_contract():
    check_contract(device.pick("cpu"))


def test_an_npu_keeps_the_contract(ascend, monkeypatch):
    monkeypatch.setattr(npu, "torch", types.SimpleNamespace(npu=ascend))
    monkeypatch.setattr(accelerator.torch, "device", lambda kind, index: types.SimpleNamespace(type=kind, index=index))
    picked = device.pick("npu:1")
    check_contract(picked)
    assert (picked.kind, picked.index) == ("npu", 1)
    assert picked.peak().flops == pytest.approx(294.9e12)
    assert ascend.synchronized == [1]
    assert ascend.seeds == [3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_a_gpu_keeps_the_contract():
    check_contract(device.pick("cuda:0"))
    assert device.pick("auto").kind == "cuda"


def test_seeding_repeats_random_numbers():
    cpu = device.pick("cpu")
    cpu.seed(7)
    first = torch.rand(3)
    cpu.seed(7)
    assert torch.equal(first, torch.rand(3))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator is here")
def test_auto_falls_to_the_cpu_where_there_is_no_accelerator():
    assert device.pick("auto").kind == "cpu"
    assert [d.kind for d in device.available()] == ["cpu"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpu", "device=gpu is unknown"),
        ("cpu:1", "there is one CPU device"),
        ("cuda:a", "device=cuda:a is unknown"),
    ],
)
def test_a_device_that_cannot_be_is_refused(name, words):
    with pytest.raises(ConfigError, match=words):
        device.pick(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="an NVIDIA GPU is here")
def test_a_missing_gpu_is_refused_with_its_remedy():
    with pytest.raises(ConfigError, match="sees no NVIDIA GPU") as caught:
        device.pick("cuda")
    assert caught.value.remedy


def test_a_missing_npu_package_is_refused_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    monkeypatch.delattr(torch, "npu", raising=False)
    with pytest.raises(ConfigError, match="torch_npu"):
        device.pick("npu")


def test_an_npu_package_without_its_driver_is_refused_in_one_sentence(monkeypatch):
    def fail(name: str) -> None:
        raise ImportError("libascend_hal.so: cannot open shared object file")

    monkeypatch.delattr(torch, "npu", raising=False)
    monkeypatch.setattr(npu.importlib, "import_module", fail)
    with pytest.raises(ConfigError, match=r"torch_npu cannot load: libascend_hal\.so"):
        device.pick("npu")


def test_an_index_past_the_last_device_is_refused(ascend, monkeypatch):
    monkeypatch.setattr(npu, "torch", types.SimpleNamespace(npu=ascend))
    with pytest.raises(ConfigError, match="there are 2 NPUs"):
        device.pick("npu:2")


def test_the_first_matching_data_sheet_is_used():
    def peak(name: str):
        backend = types.SimpleNamespace(get_device_name=lambda index: name)
        return accelerator.Accelerator("cuda", 0, backend, cuda.PEAKS, lambda _: None).peak()

    assert peak("NVIDIA H200").bytes_per_s == pytest.approx(4.8e12)
    assert peak("NVIDIA GH200 480GB").bytes_per_s == pytest.approx(4.0e12)
    assert peak("NVIDIA H100 80GB HBM3").flops == pytest.approx(989e12)
    assert peak("NVIDIA H100 PCIe").flops == pytest.approx(756e12)
    assert peak("NVIDIA L40S").flops == pytest.approx(362e12)
    assert peak("Some Toy") is None


MAPPING = """
	NPU ID                         Chip ID                        Chip Logic ID                  Chip Name
	0                              0                              0                              Ascend 910_9391
	0                              1                              1                              Ascend 910_9391
	0                              2                              -                              Mcu
	4                              0                              2                              Ascend 910_9391
	4                              1                              3                              Ascend 910_9391
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """`npu-smi` of a machine whose cards have two chips each; it says which one it was asked for."""
    tool = tmp_path / "npu-smi"
    power = 'printf "NPU Real-time Power(W) : %d.5\\n" $(( 100 + $5 * 10 + $7 ))'
    tool.write_text(f"#!/bin/sh\nif [ \"$2\" = -m ]; then cat <<'END'\n{MAPPING}END\nelse {power}; fi\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    npu_smi.places.cache_clear()
    yield
    npu_smi.places.cache_clear()


def test_power_is_asked_for_by_card_and_chip_of_the_device_that_the_process_sees(smi, monkeypatch):
    subject = accelerator.Accelerator("npu", 1, None, (), npu_smi.power_w)
    assert subject.power_w() == 101.5  # card 0, chip 1
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,3")
    assert subject.power_w() == 141.5  # the second that it sees: card 4, chip 1
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,9")
    assert subject.power_w() is None


def test_power_is_unknown_without_the_vendors_tool(monkeypatch):
    npu_smi.places.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert accelerator.Accelerator("npu", 1, None, (), npu_smi.power_w).power_w() is None
    npu_smi.places.cache_clear()


# torch_npu/csrc/core/npu/NpuVariables.cpp, version 2.13.0
A2 = ("910B1", "910B2", "910B2C", "910B3", "910B4", "910B4-1")
A3 = ("910_9391", "910_9392", "910_9381", "910_9382", "910_9372", "910_9362", "910_9363")


@pytest.mark.parametrize("name", [*A2, *A3])
def test_every_chip_of_an_a2_or_a3_is_on_file(name):
    backend = types.SimpleNamespace(get_device_name=lambda index: f"Ascend{name}")
    peak = accelerator.Accelerator("npu", 0, backend, npu.PEAKS, lambda _: None).peak()
    assert 250e12 < peak.flops < 400e12 and peak.bytes_per_s >= 0.8e12
    assert hardware.find(f"Ascend{name}") == ("910C" if name in A3 else "910B")


def test_a_process_is_told_what_suits_its_role_and_what_the_user_set_stands(monkeypatch):
    for name in {setting.name for setting in npu_settings.TABLE}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "77")
    monkeypatch.setenv(WORKER, "learner-3")
    npu_settings.apply()
    learner = dict(os.environ)
    assert learner["TASK_QUEUE_ENABLE"] == "2" and learner["HCCL_CONNECT_TIMEOUT"] == "77"
    assert "HCCL_OP_EXPANSION_MODE" not in learner and "HCCL_DETERMINISTIC" not in learner
    assert list(npu_settings.unlike_wanted()) == [("HCCL_CONNECT_TIMEOUT", "77", "1200")]
    # One process that does all captures graphs, too.
    assert npu_settings.environment(npu_settings.EVERY)["TASK_QUEUE_ENABLE"] == "1"
    assert npu_settings.environment(["rollout"], is_deterministic=True)["HCCL_DETERMINISTIC"] == "true"
    assert all(setting.reason and set(setting.roles) <= set(npu_settings.EVERY) for setting in npu_settings.TABLE)


def test_the_page_shows_the_table_of_settings():
    page = (Path(__file__).resolve().parents[2] / "docs" / "ascend.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| (.+?) \|", page, re.M)
    assert rows == [(s.name, s.value, _named(s)) for s in npu_settings.TABLE]


def _named(setting):
    roles = "all" if setting.roles == npu_settings.EVERY else ", ".join(setting.roles)
    return f"{roles}, with `deterministic`" if setting.only_deterministic else roles


def test_installed_versions_are_read_from_the_driver_up(tmp_path, monkeypatch):
    (tmp_path / "compiler").mkdir()
    (tmp_path / "compiler" / "version.info").write_text("Version=8.5.0\nversion_dir=8.5.0\n")
    (tmp_path / "driver.info").write_text("Version=25.5.0\nascendhal_version=7.35.23\n")
    files = {
        "driver": (str(tmp_path / "driver.info"),),
        "CANN": ("{toolkit}/compiler/version.info",),
        "HCCL": ("none",),
    }
    monkeypatch.setattr(npu_smi, "VERSION_FILES", files)
    assert npu_smi.versions(str(tmp_path)) == {"driver": "25.5.0", "CANN": "8.5.0"}


def test_a_containers_limits_count(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    memory = host.memory()
    assert (memory.total, memory.free) == (1_000_000, 600_000)
    assert host.cores() == 1
    (tmp_path / "memory.max").write_text("max\n")
    assert host.memory().total > 1_000_000


def test_naming_devices_needs_no_torch():
    subprocess.run([sys.executable, "-c", "import sys, tidemill.device; assert 'torch' not in sys.modules"], check=True)


def test_triton_is_asked_for_the_kinds_that_it_compiles_our_kernels_for(monkeypatch):
    """A package of that name may be there for another vendor's devices, which our kernels have never run on."""
    from tidemill.learn.logprob.tokens import can_fuse

    def on(kind):
        return can_fuse(types.SimpleNamespace(device=types.SimpleNamespace(type=kind)))

    for is_there in (True, False):
        monkeypatch.setattr(device.importlib.util, "find_spec", lambda _, found=is_there: found or None)
        device.has_triton.cache_clear()
        assert [kind for kind in device.KINDS if on(kind)] == (["cuda"] if is_there else [])
    device.has_triton.cache_clear()
