"""A run whose rollout does not fit its cache: pages on the host change no sample, and the step tells what was done."""

from __future__ import annotations

from pathlib import Path

from tests.flow.test_async import lines, samples
from tests.flow.test_schedules import run


def test_a_run_tells_of_evicted_samples_and_makes_the_same_ones(tmp_path: Path) -> None:
    over = {"train": {"steps": 2, "updates_per_step": 1}, "data": {"max_prompt_tokens": 16}}
    over["observe"] = {"samples_per_step": 100}
    found = {}
    ways = {"roomy": {}, "recomputed": {"cache_tokens": 96}, "host": {"cache_tokens": 96, "cache_on_host_gb": 0.01}}
    for name, room in ways.items():
        rollout = {"max_new_tokens": 40, "page_size": 4, **room}
        folder = run(tmp_path / name, rollout=rollout, **over)
        told = lines(folder)
        names = ("preempted_samples", "recomputed_tokens", "host_cache/out_bytes", "host_cache/in_bytes")
        found[name] = [sum(line.get(key, 0) for line in told) for key in names]
        found[name].append(samples(folder))
    evicted, recomputed, out, back, made = found["host"]
    assert evicted > 0 and recomputed == 0 and out >= back > 0
    assert found["recomputed"][1] > 0 == found["recomputed"][2] and found["roomy"][:4] == [0, 0, 0, 0]
    assert [s["response"] for s in made] == [s["response"] for s in found["roomy"][4]]
