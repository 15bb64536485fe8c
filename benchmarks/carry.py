"""Carry-over (`flow.carry_over`) beside plain `sync`, in samples/s, with a simulated long tail: the job of
`tidemill bench schedule`, where one prompt in `long_every` has responses some ten times longer than the others.

Rollout and learning take turns on one simulated device. Plain `sync` waits in every step for the longest sample; with
carry-over a step takes the groups that finish first, and none is learned from more than `staleness` steps after it
entered. `async` with the same bound needs a second device, and is there to compare.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks import schedule

ABOUT = "carry-over of a step's unfinished tail against sync: samples/s with a simulated long tail"
OPTIONS: dict[str, Any] = {
    **{
        name: schedule.OPTIONS[name] for name in ("warmup", "prompts", "samples", "long_every", "microbatch", "threads")
    },
    "steps": 8,
    "staleness": 2,  # the bound
    "carry_over": 0.5,
    "decode_ms": 20.0,
    "learn_us": 300.0,
}
CASES: dict[str, dict[str, Any]] = {
    "sync": {"schedule": "sync", "placement": "colocated"},
    "carry": {"schedule": "sync", "placement": "colocated"},
    "async": {"schedule": "async"},
}


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    for _ in range(int(options["repeats"])):
        for name, case in CASES.items():
            carried = options["carry_over"] if name == "carry" else 0
            rounds[name].append(schedule.in_process({**options, **case, "part": "speed", "carry_over": carried}))
            print(name, rounds[name][-1], file=sys.stderr, flush=True)
    result: dict[str, Any] = {name: schedule.merged(found) for name, found in rounds.items()}
    for name, found in rounds.items():
        result[f"{name}_samples_per_s"] = result[name]["samples_per_s"]
        result[f"{name}_staleness"] = statistics.median(r.get("staleness", 0.0) for r in found)
    pairs = list(zip(rounds["carry"], rounds["sync"], strict=True))
    ratios = [carry["samples_per_s"] / sync["samples_per_s"] for carry, sync in pairs]
    return {**result, "carry_over_sync": statistics.median(ratios), "carry_over_sync_by_round": ratios}
