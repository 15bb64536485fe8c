"""Runs on processes of one machine, 1 to 4 rollout workers under three schedules, with all that a prediction needs.

    OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= python benchmarks/_plan_cpu.py --out FOLDER   # minutes, on 8 quiet cores
    … python benchmarks/_plan_cpu.py --out FOLDER --steps 6 --minutes 15                   # on 2 quiet cores

With `--minutes` no run is begun that would end later, judged by the longest so far; those left out are named.

FOLDER gets a calibration of the machine's processor, and a folder a run: its settings, metrics, samples and timeline.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent)]

SCHEDULES = ("sync", "streamed", "async")
STEPS = 8
KEPT = ("config.yaml", "metrics.jsonl", "samples.jsonl", "summary.json", "timeline")


def cases(workers: tuple[int, ...] = (1, 2, 3, 4), steps: int = STEPS) -> Iterator[tuple[str, dict[str, Any]]]:
    for rollouts in workers:
        for schedule in SCHEDULES:
            yield f"{schedule}-{rollouts}", recipe(schedule, rollouts, steps=steps)
    if len(workers) > 1:
        yield "sync-2-learners", recipe("sync", 2, learners=2, steps=steps)


def recipe(schedule: str, rollouts: int, learners: int = 1, steps: int = STEPS) -> dict[str, Any]:
    return {
        "seed": 7,
        "model": {"tiny": {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 384, "window": 160}},
        "data": {"source": "arithmetic", "max_prompt_tokens": 32, "held_out": 0},
        "train": {
            "steps": steps,
            "prompts_per_step": 24,
            "samples_per_prompt": 8,
            "tokens_per_microbatch": 4096,
        },
        "rollout": {"max_new_tokens": 96, "concurrent": 64},
        # Rewards that differ within every group: equal ones would spare the learner their backward pass.
        "rewards": [{"function": f"{HERE / '_step_ours.py'}:noise"}],
        "algorithm": "grpo",
        "learn": {"lr": 1e-6},
        "flow": {"schedule": schedule, **({"max_staleness": 1} if schedule == "async" else {})},
        "cluster": {"executor": "processes", "rollouts": rollouts, "learners": learners},
        "eval": {"size": 0, "before": False, "after": False},
        "checkpoint": {"every": 0},
        "observe": {"tensorboard": False, "samples_per_step": 100_000, "timeline": "work", "progress": "off"},
    }


def run(name: str, settings: dict[str, Any], out: Path) -> float:
    """Train, and keep what a prediction needs; the median second of a step after the first two."""
    from tidemill.observe.run_folder import metrics_of
    from tidemill.run import start

    folder = out / "runs"
    start.train({**settings, "name": name, "folder": str(folder)})
    made = folder / name
    (out / name).mkdir(parents=True, exist_ok=True)
    for kept in KEPT:
        if (made / kept).is_dir():
            shutil.copytree(made / kept, out / name / kept, dirs_exist_ok=True)
        elif (made / kept).exists():
            shutil.copy(made / kept, out / name / kept)
    shutil.rmtree(made)
    steps = sorted(m["time/step"] for m in metrics_of(out / name)[2:])
    return float(steps[len(steps) // 2])


def calibrate(out: Path) -> None:
    from tidemill.plan.calibrate import calibrate as taken

    made = taken(lambda text: print(f"calibrate: {text}", flush=True))
    out.mkdir(parents=True, exist_ok=True)
    (out / "cpu.json").write_text(made.dump(), encoding="utf-8")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", default=os.environ.get("OUT", "."))
    options.add_argument("--workers", default="1,2,3,4")
    options.add_argument("--steps", type=int, default=STEPS, help="of each run; the first two are not compared")
    options.add_argument("--minutes", type=float, default=float("inf"))
    asked = options.parse_args()
    if asked.steps < 3:
        options.error("--steps: the first two are not compared; ask for 3 or more")
    out = Path(asked.out)
    began = time.perf_counter()
    calibrate(out)
    longest = 0.0
    for name, settings in cases(tuple(int(n) for n in asked.workers.split(",")), asked.steps):
        last = time.perf_counter()
        if last - began + longest > 60 * asked.minutes:
            print(f"{name}: left out, for want of time", flush=True)
            continue
        try:
            step_s = run(name, settings, out)
            print(f"{name}: {step_s:.4f} s a step, {time.perf_counter() - began:.0f} s in", flush=True)
        except Exception as error:
            print(f"{name}: failed: {error!r}"[:800], flush=True)
        longest = max(longest, time.perf_counter() - last)
    shutil.rmtree(out / "runs", ignore_errors=True)


if __name__ == "__main__":
    main()
