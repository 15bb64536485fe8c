"""What reinforcement learning makes of SmolLM2-135M on GSM8K: accuracy by step, token and second, over seeds.

tidemill bench real --json                                    # one GPU
tidemill bench real --peers trl --json                        # and TRL, with vLLM in its process, on the same job
tidemill bench real --size cpu --seeds 1 --json               # 2 CPU cores, 15 minutes a seed
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._recipe_runs import Came, Job, base, run_all
from tidemill.bench import peer_environment
from tidemill.errors import ConfigError, TidemillError
from tidemill.run.trained import export

ABOUT = "GSM8K with SmolLM2-135M: base, supervised and reinforced, by algorithm and seed"
OPTIONS = {
    "size": "gpu",  # gpu, or cpu: the recipe's size for two cores
    "task": "gsm8k",  # gsm8k, countdown, json, reasoning or preference
    "algorithms": ["grpo"],  # also dapo, gspo, ppo
    "schedules": ["streamed"],  # also sync, async
    "seeds": 3,
    "steps": 0,  # 0: the recipe's
    "samples": 4,  # of each held-out problem, for pass@k
    "every": 0,  # steps between evaluations; 0: the recipe's
    "at_once": 1,  # runs side by side; their seconds are then those of a shared device
    "limit_s": 36_000,
    "targets": [0.05, 0.08, 0.10, 0.12, 0.15],  # held-out greedy accuracies of `seconds_to`
    "settings": [],  # more settings of every run
    "folder": "",  # where runs are kept; none: a temporary folder
    "with_base": True,
}
PEERS = {"trl": "trl"}
TRL_PASS = 32  # samples that TRL learns from at once
TRL_EVERY = 50  # steps between TRL's evaluations where the recipe names none
WHOLE = 1319  # held-out problems of GSM8K
BASE_PROBLEMS = 400  # held-out problems that the untrained model is asked
# What another algorithm needs beside its name, with GRPO's data, batch and learning rate.
ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "grpo": (),
    "dapo": ("algorithm.name=dapo",),
    "gspo": ("algorithm.name=gspo", "algorithm.clip_low=0.0003", "algorithm.clip_high=0.0004"),
    "ppo": ("algorithm.name=ppo",),
}


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    unknown = set(options["algorithms"]) - ALGORITHMS.keys()
    if unknown:
        raise ConfigError(
            f"bench real knows no algorithm {', '.join(sorted(unknown))}", f"one of {', '.join(ALGORITHMS)}"
        )
    if options["peers"] and options["task"] != "gsm8k":
        raise ConfigError("bench real compares with TRL on GSM8K alone", "leave out task, or the peer")
    with tempfile.TemporaryDirectory(prefix="tidemill-real-") as temporary:
        place = Path(options["folder"] or temporary)
        place.mkdir(parents=True, exist_ok=True)
        return measure(options, place)


def measure(options: Mapping[str, Any], place: Path) -> dict[str, Any]:
    recipe = f"real/{options['task']}-smollm2" + ("-cpu" if options["size"] == "cpu" else "")
    jobs = [
        Job(recipe, seed, (*ALGORITHMS[name], f"flow.schedule={schedule}", *_common(options)), f"{name}-{schedule}")
        for name in options["algorithms"]
        for schedule in options["schedules"]
        for seed in range(int(options["seeds"]))
    ]
    came = run_all(jobs, place, int(options["at_once"]), float(options["limit_s"]))
    labels = dict.fromkeys(job.label for job in jobs)
    result: dict[str, Any] = {
        label: of_seeds([c for c in came if c.job.label == label], options["targets"]) for label in labels
    }
    if "trl" in options["peers"]:
        theirs = [with_trl(c, options, place) for c in came if c.job.label == next(iter(labels))]
        result["peers"] = {"trl": of_curves(theirs, options["targets"])}
    if options["with_base"]:
        result["base"] = base("smollm2-135m", recipe, BASE_PROBLEMS, int(options["samples"]))
    return result


def _common(options: Mapping[str, Any]) -> list[str]:
    chosen = {"train.steps": options["steps"], "eval.every": options["every"]}
    words = [f"{key}={value}" for key, value in chosen.items() if value]
    return [*words, f"eval.samples={options['samples']}", *options["settings"]]


def of_seeds(came: Sequence[Came], targets: Sequence[float]) -> dict[str, Any]:
    """Return one algorithm's result: before (the supervised model) and after, by seed, and when it reached what."""
    steps = [[m for m in one.metrics if "loss" in m] for one in came]
    shares = {key for one in came for key in one.after if key.startswith("pass@")}
    return {
        "greedy": {"sft": [c.before["greedy"] for c in came], "rl": [c.after["greedy"] for c in came]},
        **{
            key.replace("@", "_at_"): {"sft": [c.before[key] for c in came], "rl": [c.after[key] for c in came]}
            for key in sorted(shares)
        },
        "steps": [len(of_one) for of_one in steps],
        "seconds_per_step": [statistics.median(m["time/step"] for m in of_one[1:] or of_one) for of_one in steps],
        "seconds_to": {str(target): [seconds_to(c.curve, target) for c in came] for target in targets},
        "curves": {str(c.job.seed): c.curve for c in came},
    }


def seconds_to(curve: Sequence[Mapping[str, float]], target: float) -> float | None:
    """Return the seconds of training until an evaluation's greedy accuracy reached a target."""
    return next((point["seconds"] for point in curve if point["greedy"] >= target), None)


def with_trl(came: Came, options: Mapping[str, Any], place: Path) -> list[dict[str, float]]:
    """Return TRL's curve on one of our jobs: from its supervised model, with its seed."""
    run, folder = place / came.job.name, place / f"trl-{came.job.seed}"
    model = folder / "supervised"
    export(run / "warm_start", model)
    every = int(options["every"]) or TRL_EVERY
    job = {
        "config": str(run / "config.yaml"),
        "model": str(model),
        "folder": str(folder),
        "every": every,
        "pass": TRL_PASS,
    }
    program = Path(__file__).with_name("_real_trl.py")
    done = subprocess.run(
        [sys.executable, str(program), json.dumps(job)], stdout=subprocess.PIPE, text=True, env=peer_environment()
    )
    if done.returncode != 0:
        raise TidemillError("TRL's run failed", "its own messages stand above")
    points = json.loads(done.stdout.strip().splitlines()[-1])
    return [judged(point, folder, came.job.recipe, options) for point in points]


def judged(point: dict[str, Any], folder: Path, recipe: str, options: Mapping[str, Any]) -> dict[str, float]:
    """A point of TRL's curve with its checkpoint's held-out accuracy, measured as ours is."""
    checkpoint = folder / f"checkpoint-{point.pop('checkpoint')}"
    size = next((s.split("=")[1] for s in options["settings"] if s.startswith("eval.size=")), 0)
    return point | base(str(checkpoint), recipe, int(size) or WHOLE, int(options["samples"]))


def of_curves(curves: Sequence[list[dict[str, float]]], targets: Sequence[float]) -> dict[str, Any]:
    return {
        "greedy": {"rl": [curve[-1]["greedy"] for curve in curves]},
        "seconds_per_step": [curve[-1]["seconds"] / curve[-1]["step"] for curve in curves],
        "seconds_to": {str(target): [seconds_to(curve, target) for curve in curves] for target in targets},
        "curves": {str(seed): curve for seed, curve in enumerate(curves)},
    }
