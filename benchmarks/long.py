"""Long work in rollout: a cache that many samples do not fit in, recomputed or paged to the host, and one sample of
many tokens with what the engine holds on its way.

    tidemill bench long --json
    tidemill bench long crowded=false prompt=65536 response=65536 --json
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ABOUT = "long rollouts: a crowded cache recomputed against paged to the host, and memory over one sample's length"
OPTIONS: dict[str, Any] = {
    "crowded": True, "shape": "60m", "room": 4, "prompts": 8, "samples": 4, "asked": 128, "made": 192,
    "prompt": 8192, "response": 8192, "step_tokens": 512,
}  # fmt: skip
HOST_BYTES = 2_000_000_000
MARKS = (0.25, 0.5, 0.75, 1.0)
MB = 1e6


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    """`room`: the crowded cache holds one part in so many of what the samples need at once. `prompt`, `response`: of
    the one sample; 0 leaves it out."""
    import torch

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if options["crowded"]:
        found["crowded"] = crowded(options)
    if options["prompt"]:
        found["long"] = alone(int(options["prompt"]), int(options["response"]), int(options["step_tokens"]))
    return found


def crowded(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same samples with room for all, in a small cache, and in the same with pages on the host; turn by turn."""
    import torch

    from benchmarks.rollout import _shape
    from tidemill.rollout.native.engine import NativeEngine

    prompts, samples, asked, made = (int(options[name]) for name in ("prompts", "samples", "asked", "made"))
    needed = prompts * (asked + samples * made)
    model = _shape(options["shape"], "cpu", asked + made).model
    ways = {"roomy": (needed, 0), "recomputed": (needed // int(options["room"]), 0)}
    ways["on_host"] = (ways["recomputed"][0], HOST_BYTES)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    told: dict[str, Any] = {}
    texts = torch.randint(3, 90, (prompts, asked), generator=torch.Generator().manual_seed(0)).tolist()
    for repeat in range(-1, int(options["repeats"])):  # the first is not counted
        for name, (tokens, host) in ways.items():
            engine = NativeEngine(
                model, eos_ids=(), max_seqs=prompts * samples, max_len=asked + made, cache_tokens=tokens,
                host_bytes=host, speculate="off",
            )  # fmt: skip
            began = _cpu_s()
            made_tokens = _roll(engine, texts, samples, made)
            if repeat >= 0:
                seconds[name].append(_cpu_s() - began)
            told[name] = {"made": made_tokens, "cache_tokens": tokens, **engine.cache_counts()}
    for name, took in seconds.items():
        told[name] |= {"cpu_s": statistics.median(took), "least_s": min(took), "most_s": max(took)}
    assert len({row.pop("made") for row in told.values()}) == 1, "the ways made different tokens"
    told["recomputed_over_on_host"] = told["recomputed"]["cpu_s"] / told["on_host"]["cpu_s"]
    return told


def _cpu_s() -> float:
    gc.collect()
    return time.process_time()


def _roll(engine: Any, texts: list[list[int]], samples: int, made: int) -> int:
    """A checksum of the tokens."""
    from tidemill.cluster.worker.engine_ranks import checksum
    from tidemill.rollout.engine import Request, Sampling

    for i, text in enumerate(texts):
        engine.submit(Request(i, text, Sampling(max_tokens=made, ignore_eos=True), n=samples))
    done = []
    while engine.has_work:
        done += engine.step()
    return checksum(sorted(done, key=lambda c: (c.request.id, c.index)))


def alone(prompt: int, response: int, step_tokens: int) -> dict[str, Any]:
    """One sample. What this process holds beside the cache, at quarters of the way."""
    import numpy as np

    from tidemill.rollout.engine import Request, Sampling

    total = prompt + response
    engine = _small_engine(total, step_tokens)
    text = np.random.default_rng(0).integers(3, 90, prompt).tolist()
    engine.submit(Request(0, [5] * 64, Sampling(max_tokens=64, ignore_eos=True)))  # warm
    while engine.has_work:
        engine.step()
    start, began, worked = _resident(), time.perf_counter(), time.process_time()
    engine.submit(Request(1, text, Sampling(max_tokens=response, ignore_eos=True)))
    marks = list(_marks(engine, total, began))
    most = [row["beside_cache_mb"] for row in marks]
    return {
        "prompt": prompt, "response": response, "cache_mb": marks[-1]["cache_mb"], "start_mb": start / MB,
        "marks": marks, "growth_mb": max(most) - most[0], "peak_mb": _peak() / MB,
        "seconds": time.perf_counter() - began, "cpu_s": time.process_time() - worked,
    }  # fmt: skip


def _small_engine(total: int, step_tokens: int) -> Any:
    """A model so small that attention over a long past is its work."""
    import torch

    from tidemill.models.load import make_tiny
    from tidemill.recipe.config import TinyModel
    from tidemill.rollout.native.engine import NativeEngine

    shape = TinyModel(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64, window=total)
    loaded = make_tiny(shape, torch.float32, 0, torch.device("cpu"))
    loaded.model.requires_grad_(False)
    return NativeEngine(
        loaded.model, eos_ids=(), max_seqs=1, max_len=total, step_tokens=step_tokens, speculate="off"
    )  # fmt: skip


def _marks(engine: Any, total: int, began: float) -> Iterator[dict[str, float]]:
    """Run to the end; what is held whenever a quarter more is cached."""
    left = list(MARKS)
    page_bytes = engine.store.nbytes / engine.store.pages
    while engine.has_work:
        ended = bool(engine.step())
        cached = max((t.done for t in engine.scheduler.reading), default=0)
        cached = max(cached, int(engine.scheduler.slots.length[engine.scheduler.slots.active].max(initial=0)))
        if left and (cached >= left[0] * total or ended):
            at = total if ended else cached
            cache = -(-at // engine.pool.page_size) * page_bytes
            rss = _resident()
            yield {
                "share": left.pop(0), "tokens": at, "rss_mb": rss / MB, "cache_mb": cache / MB,
                "beside_cache_mb": (rss - cache) / MB, "seconds": time.perf_counter() - began,
            }  # fmt: skip


def _resident() -> int:
    from tidemill.device import host

    gc.collect()
    return host.memory().reserved


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
