"""How fast checkpoints are written, verified and read, beside torch.save of the same tensors."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tidemill.bench import repeat

ABOUT = "save, verify and load a checkpoint; peer: torch.save (pickle, no checksum, not synced)"
OPTIONS = {"megabytes": 256, "tensors": 64, "folder": ""}
PEERS = {"torch": "torch"}


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    count = int(options["megabytes"]) * 1_000_000 // 4 // int(options["tensors"])
    tensors = {f"t{i}": torch.randn(count) for i in range(int(options["tensors"]))}
    place = Path(tempfile.mkdtemp(dir=options["folder"] or None))
    try:
        result = _ours(tensors, place / "ours", options["repeats"])
        peers = {"torch": _torch_save(tensors, place / "t.pt", options["repeats"])} if options["peers"] else {}
    finally:
        shutil.rmtree(place)
    return {**result, "peers": peers}


def _rate(tensors: Mapping[str, Any], work: Callable[[], object], times: int) -> dict[str, Any]:
    """GB/s."""
    import time

    size = sum(t.numel() * t.element_size() for t in tensors.values())

    def measure() -> float:
        started = time.perf_counter()
        work()
        return size / 1e9 / (time.perf_counter() - started)

    return repeat(measure, times, warmup=1)


def _touch(tensors: Mapping[str, Any]) -> None:
    """Read every byte: a file may be mapped and not read yet."""
    for tensor in tensors.values():
        tensor.sum()


def _ours(tensors: Mapping[str, Any], place: Path, times: int) -> dict[str, Any]:
    from tidemill.learn import checkpoint

    return {
        "save_gb_per_s": _rate(tensors, lambda: checkpoint.save(place, 1, tensors, {}, keep=1), times),
        "verify_gb_per_s": _rate(tensors, lambda: checkpoint.latest(place), times),
        "load_gb_per_s": _rate(tensors, lambda: _touch(checkpoint.load(place / "step-000001")[0]), times),
    }


def _torch_save(tensors: Mapping[str, Any], file: Path, times: int) -> dict[str, Any]:
    import torch

    return {
        "save_gb_per_s": _rate(tensors, lambda: torch.save(dict(tensors), file), times),
        "load_gb_per_s": _rate(tensors, lambda: _touch(torch.load(file, weights_only=True)), times),
    }
