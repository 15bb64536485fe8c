"""The simulator: how long a large run takes to simulate, and how near a replay comes to a run that was measured.

    tidemill bench simulate --json
    tidemill bench simulate --json steps=1000 replay=false
    tidemill bench simulate --json devices=0               # the replays alone: minutes, on a quiet machine

Large: GRPO on Qwen2.5-32B on 10,000 devices; three quarters of them roll out, in engines of eight. Replay: small runs
on processes of this machine under three schedules, each made anew and then simulated from its workers' own traces.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ABOUT = "the simulator: seconds for 10,000 devices, and the replay of measured runs on processes"
OPTIONS: dict[str, Any] = {"devices": 10_000, "steps": 10, "replay": True, "workers": 2, "replay_steps": 12}
SCHEDULES = ("sync", "streamed", "async")


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = large(options["devices"], options["steps"]) if options["devices"] else {}
    if options["replay"]:
        rows = [replayed(schedule, options["workers"], options["replay_steps"]) for schedule in SCHEDULES]
        found |= {"replays": rows, "replay_error": max(abs(row["error"]) for row in rows)}
    return found


def large(devices: int, steps: int) -> dict[str, Any]:
    from tidemill.plan import hardware
    from tidemill.plan.lengths import Lengths
    from tidemill.plan.simulate.run import idle_shares, simulate
    from tidemill.plan.time_model import TimeModel
    from tidemill.recipe.config import Config

    shards, tp = 8, 8
    copies = max(1, devices // 4 // shards)
    engines = (devices - copies * shards) // tp
    config = Config.model_validate(
        {
            "model": {"path": "qwen2.5-32b", "dtype": "bfloat16"},
            "data": {"max_prompt_tokens": 512},
            "rollout": {"max_new_tokens": 4096, "concurrent": 64, "tp": tp},
            "train": {"prompts_per_step": engines, "samples_per_prompt": 16, "tokens_per_microbatch": 32_768},
            "learn": {"parallel": {"replicate": copies, "fsdp": shards}},
            "flow": {"schedule": "async", "max_staleness": 1},
            "cluster": {"executor": "ray", "rollouts": engines},
        }
    )
    model = TimeModel(config, hardware.cluster_of("H200", -(-devices // 8)))
    began = time.process_time()
    made = simulate(model, Lengths(256, 1200, 4096), steps=steps, seed=1)
    return {
        "devices": model.devices,
        "steps": len(made.steps),
        "samples": len(made.steps) * engines * 16,
        "seconds": made.took_s,
        "cpu_s_per_step": (time.process_time() - began) / len(made.steps),
        "events": made.events,
        "simulated_hours": made.seconds / 3600,
        "step_s": made.step_s(),
        "tokens_per_s": made.tokens_per_s,
        "idle": idle_shares(made.steps),
    }


def replayed(schedule: str, workers: int, steps: int) -> dict[str, Any]:
    """Train on processes of this machine, then simulate that run."""
    from benchmarks._plan_cpu import recipe
    from tidemill.plan.simulate.replay import WARM, replay
    from tidemill.run import start

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="tidemill-replay-") as name:
        start.train({**recipe(schedule, workers, steps=steps), "name": schedule, "folder": name})
        again = replay(Path(name) / schedule)
    return {
        "schedule": schedule,
        "rollout_workers": workers,
        "measured_s": sum(again.measured[WARM:]),
        "replayed_s": sum(step.seconds for step in again.simulation.steps[WARM:]),
        "error": again.error,
    }
