import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tidemill.errors import CheckpointError
from tidemill.learn import checkpoint


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.w": torch.randn(64, 8, generator=generator),
        "model.b": torch.randn(5, generator=generator).bfloat16(),
        "optimizer.w.step": torch.tensor(3.0),
    }


def save(folder: Path, step: int, **extra) -> Path:
    return checkpoint.save(folder, step, tensors(step), {"step": step, "nested": {"a": [1, 2]}}, **{"keep": 3} | extra)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_what_is_saved_is_loaded_again_bit_for_bit(tmp_path):
    path = save(tmp_path, 7)
    found = checkpoint.latest(tmp_path)
    assert (found.path, found.step, found.skipped) == (path, 7, [])
    loaded, state = checkpoint.load(path)
    assert state == {"step": 7, "nested": {"a": [1, 2]}}
    assert loaded.keys() == tensors().keys()
    assert all(torch.equal(loaded[k], v) and loaded[k].dtype == v.dtype for k, v in tensors(7).items())


def test_views_of_one_storage_and_transposed_tensors_are_saved(tmp_path):
    flat = torch.arange(12.0)
    given = {"a": flat[:6].view(2, 3), "b": flat[6:], "c": flat.view(3, 4).T}
    loaded, _ = checkpoint.load(checkpoint.save(tmp_path, 1, given, {}, keep=1))
    assert all(torch.equal(loaded[k], v) for k, v in given.items())


def test_large_sets_of_tensors_are_cut_into_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("tidemill.learn.checkpoint.pieces.SHARD_BYTES", 2052)
    path = save(tmp_path, 1)
    assert len(list(path.glob("*.safetensors"))) == 2
    assert checkpoint.load(path)[0].keys() == tensors().keys()


def test_the_last_k_and_the_best_are_kept(tmp_path):
    for step in range(1, 7):
        save(tmp_path, step, keep=2, best=step in (1, 3), metric=step / 10)
    assert names(tmp_path) == ["step-000003", "step-000005", "step-000006"]
    assert checkpoint.best(tmp_path).name == "step-000003"


def test_nothing_saved_is_nothing_found(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "missing") is None


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "harm", "why"),
    [
        ("rank-00000-001.safetensors", truncate, "bytes instead of"),
        ("rank-00000-001.safetensors", flip, "does not match its checksum"),
        ("rank-00000-001.safetensors", Path.unlink, "is missing"),
        ("state.json", flip, "does not match its checksum"),
        ("manifest.json", truncate, "manifest.json is missing or unreadable"),
        ("manifest.json", Path.unlink, "manifest.json is missing or unreadable"),
    ],
)
def test_a_harmed_checkpoint_falls_back_to_the_one_before_and_says_why(tmp_path, name, harm, why):
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    harm(newest / name)
    found = checkpoint.latest(tmp_path)
    assert found.step == 1
    [(path, told)] = found.skipped
    assert path == newest
    assert why in told


def test_when_every_checkpoint_is_harmed_it_says_so(tmp_path):
    for step in (1, 2):
        truncate(save(tmp_path, step) / "state.json")
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        checkpoint.latest(tmp_path)


def test_a_save_killed_half_way_leaves_the_one_before_and_is_cleared_by_the_next(tmp_path):
    save(tmp_path, 1)
    code = (
        "import os, sys, signal, torch\n"
        "from pathlib import Path\n"
        "from tidemill.learn import checkpoint\n"
        "checkpoint.Saving.finish = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        "checkpoint.save(Path(sys.argv[1]), 2, {'w': torch.zeros(9)}, {}, keep=1)\n"
    )
    died = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert died.returncode == -signal.SIGKILL
    assert any(n.startswith(".tmp-") for n in names(tmp_path))
    assert checkpoint.latest(tmp_path).step == 1
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-000001", "step-000003"]


def test_saving_a_step_again_replaces_it_and_a_kill_in_between_loses_nothing(tmp_path, monkeypatch):
    save(tmp_path, 1)
    rename = Path.rename

    def stop_before_second(self: Path, target: Path) -> Path:
        if self.name.startswith(".tmp-"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", stop_before_second)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1)
    monkeypatch.undo()
    assert checkpoint.latest(tmp_path).step == 1
    save(tmp_path, 1)
    assert names(tmp_path) == ["step-000001"]


def assert_refused_and_nothing_lost(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="no room for a checkpoint") as caught:
        checkpoint.save(folder, 2, {"w": torch.zeros(1_000_000)}, {}, keep=1)
    assert "it needs 4.0 MB" in str(caught.value)
    assert "is free" in str(caught.value)
    assert names(folder) == ["step-000001"]
    assert checkpoint.latest(folder).step == 1


@pytest.fixture
def small_disk(tmp_path):
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("mounting needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_refuses_the_checkpoint_and_loses_nothing(small_disk):
    save(small_disk, 1)
    assert_refused_and_nothing_lost(small_disk)


def test_a_file_size_limit_refuses_the_checkpoint_and_loses_nothing(tmp_path):
    save(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        assert_refused_and_nothing_lost(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(tmp_path / "file" / "checkpoints", 1)


def test_no_file_of_a_checkpoint_is_a_pickle(tmp_path):
    assert {p.suffix for p in save(tmp_path, 1).iterdir()} == {".json", ".safetensors"}
