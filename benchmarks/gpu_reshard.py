"""Weights on an accelerator: the learner's state out to pinned host memory and back, and two processes on one device.

Needs torch and numpy only: `PYTHONPATH=src python benchmarks/gpu_reshard.py` prints a table and, last, one JSON object.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / part) for part in ("src", "")]

ABOUT = "swap a 1.5B learner's full state out and in; move weights between two processes of one device"
OPTIONS = {"model": "qwen2.5-1.5b", "moved_model": "qwen2.5-0.5b"}
PEERS: dict[str, str] = {}


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    from benchmarks import publish
    from tidemill import device

    chosen = device.pick()
    if chosen.kind == "cpu":
        from tidemill.errors import ConfigError

        raise ConfigError("bench gpu_reshard measures copies to and from an accelerator; there is none here")
    repeats = int(options["repeats"])
    result: dict[str, Any] = {"device": chosen.name}
    result |= _swap(chosen, str(options["model"]), repeats)
    sizes = {"learner": "fsdp1", "engine": "tp1", "model": options["moved_model"], "repeats": repeats}
    result["publish"] = publish.run({**publish.OPTIONS, **sizes})
    return result


# Swap


def _swap(chosen: Any, name: str, repeats: int) -> dict[str, Any]:
    import torch

    from tidemill.estimate import weight_flow
    from tidemill.reshard.layouts import parallel
    from tidemill.reshard.pack import checksum
    from tidemill.reshard.swap import Swap

    where = chosen.torch_device
    torch.zeros(1, device=where)
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    alone_free = chosen.memory().free
    pinned = _pinned_copy(where)
    torch.accelerator.empty_cache()
    model = weight_flow.published(name)
    timeline = [("start", *_memory())]
    learner = _learner_state(model, where)
    timeline.append(("learning", *_memory()))
    state_bytes = sum(t.numel() * t.element_size() for t in learner)
    sums = [checksum(t) for t in learner]
    held = Swap(where)
    started = time.perf_counter()
    held.slabs.reserve(state_bytes)
    pin_seconds = time.perf_counter() - started
    out, back, went = [], [], []
    for _ in range(repeats + 1):  # the first is reported apart: nothing of it is on the host yet
        for tensor in learner:
            tensor.neg_()  # as a step does: every element is new, whatever its dtype rounds to
        sums = [checksum(t) for t in learner]
        torch.accelerator.synchronize()
        out.append(_timed(lambda: went.append(held.out(learner))))
        freed = chosen.memory().free
        reserved = torch.accelerator.memory_reserved()
        back.append(_timed(held.back))
    exact = all(torch.equal(a, checksum(t)) for a, t in zip(sums, learner))
    unchanged = held.out(learner)
    held.back()
    engine = _one_iteration(held, learner, model, where, timeline)
    # Of what was really copied: what did not change since the last swap is freed without a copy and does not count.
    gone = [w.copied_bytes / 1e9 / s for w, s in zip(went, out)]
    rates = {"out": statistics.median(gone[1:]), "back": state_bytes / 1e9 / statistics.median(back[1:])}
    return {
        "exact": exact,
        "state_bytes": state_bytes,
        "pinned_out_gb_per_s": pinned["out"],
        "pinned_back_gb_per_s": pinned["back"],
        "swap_out_gb_per_s": rates["out"],
        "swap_back_gb_per_s": rates["back"],
        "swap_out_share_of_pinned": rates["out"] / pinned["out"],
        "swap_back_share_of_pinned": rates["back"] / pinned["back"],
        "swap_out_seconds": statistics.median(out[1:]),
        "swap_out_copied_bytes": min(w.copied_bytes for w in went),
        "first_swap_out_seconds": out[0],
        "first_swap_out_gb_per_s": gone[0],
        "first_swap_out_share_of_pinned": gone[0] / pinned["out"],
        "swap_back_seconds": statistics.median(back[1:]),
        "of_which_freeing_seconds": statistics.median(w.free_seconds for w in went[1:]),
        "pin_seconds": pin_seconds,
        "reserved_after_out_bytes": reserved,
        "free_alone_bytes": alone_free,
        "free_after_out_bytes": freed,
        "free_share_of_alone": freed / alone_free,
        "unchanged_copied_bytes": unchanged.copied_bytes,
        "unchanged_seconds": unchanged.seconds,
        **engine,
        "timeline": timeline,
        "parameters": parallel.count(model),
    }


def _learner_state(model: Any, where: Any) -> list[Any]:
    """Parameters and gradients in 16 bits; main weights and Adam's two moments in 32."""
    import torch

    kinds = [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32, torch.float32]
    return [torch.randn(s, device=where).to(k) for k in kinds for s in model.shapes.values()]


def _one_iteration(held: Any, learner: list[Any], model: Any, where: Any, timeline: list[Any]) -> dict[str, Any]:
    """Learn, hand the weights to an engine of other (fused) tensors, swap out, roll out, come back: memory at each."""
    import torch

    from tidemill.reshard.layouts import parallel
    from tidemill.reshard.move import Job, Moved, copy_local, own_copies
    from tidemill.reshard.plan import plan

    one = parallel.parse("dp1")
    source, target = parallel.learner(model, one), parallel.engine(model, one)
    sources = dict(zip(model.shapes, learner))
    targets = {n: torch.empty(s, dtype=getattr(torch, d), device=where) for n, (s, d) in target.homes(0).items()}
    made = plan(source, target)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    moved = Moved(1)
    job = Job(made, 0, sources, targets, 1)
    started = time.perf_counter()
    for transfer in own_copies(job):
        copy_local(transfer, job, moved, 1 << 26)
    torch.accelerator.synchronize()
    seconds = time.perf_counter() - started
    extra = torch.accelerator.max_memory_allocated() - before
    timeline.append(("engine has weights", *_memory()))
    held.out(learner)
    timeline.append(("learner out", *_memory()))
    cache = [torch.empty(1 << 30, dtype=torch.uint8, device=where) for _ in range(40)]
    timeline.append(("rolling out, 40 GiB cache", *_memory()))
    del cache
    torch.accelerator.empty_cache()
    timeline.append(("cache given back", *_memory()))
    held.back()
    timeline.append(("learner back", *_memory()))
    targets.clear()
    torch.accelerator.empty_cache()
    timeline.append(("learning again", *_memory()))
    identity = plan(source, parallel.engine(model, one, fused=False))
    return {
        "fuse_copied_bytes": moved.copied_bytes,
        "fuse_seconds": seconds,
        "fuse_peak_extra_bytes": extra,
        "one_process_moved_bytes": identity.bytes if identity.is_identity else -1,
    }


def _memory() -> tuple[int, int]:
    import torch

    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()


def _pinned_copy(where: Any, nbytes: int = 1 << 30, times: int = 7) -> dict[str, float]:
    """GB/s of plain copies of one large pinned buffer: what the link gives."""
    import torch

    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(nbytes, dtype=torch.uint8, device=where)

    def rate(copy: Callable[[], object]) -> float:
        copy()
        torch.accelerator.synchronize()
        return nbytes / 1e9 / statistics.median(_timed(copy) for _ in range(times))

    found = {
        "out": rate(lambda: host.copy_(there, non_blocking=True)),
        "back": rate(lambda: there.copy_(host, non_blocking=True)),
    }
    return found


def _timed(work: Callable[[], object]) -> float:
    import torch

    started = time.perf_counter()
    work()
    torch.accelerator.synchronize()
    return time.perf_counter() - started


def main() -> None:
    import torch

    started = time.perf_counter()
    result = run({**OPTIONS, "repeats": 3, "peers": []})
    result["bench_seconds"] = time.perf_counter() - started
    result["torch"] = torch.__version__
    for key, value in result.items():
        if key != "timeline":
            print(f"{key:32} {value:,.4g}" if isinstance(value, int | float) else f"{key:32} {value}")
    for phase, allocated, reserved in result["timeline"]:
        print(f"  {phase:28} {allocated / 1e9:8.2f} GB in use {reserved / 1e9:8.2f} GB reserved")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
