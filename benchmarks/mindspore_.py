"""MindSpore's learner beside torch's: tokens per second of accumulating and updating, how far losses and norms are
apart, and what the quickstart has learned after some steps with either.

Each learner runs in a process of its own, round by round, on the same samples, with its graphs compiled before time
counts; `compile_s` is what that took. Tokens per CPU-second, of all its processes, mean something on a busy machine,
too. `learn.mindspore.python` is found as in a run, or given as `python`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks._learn_trl import model_of
from benchmarks.learn import batch_of, samples_of
from tidemill.bench import peer_environment, summary

ABOUT = "MindSpore's learner beside torch's: tokens per second, how far losses are apart, accuracy of the quickstart"
OPTIONS: dict[str, Any] = {
    "groups": 16,
    "samples": 8,
    "prompt": 48,  # mean tokens; each is drawn between half and one and a half of it
    "response": 64,
    "hidden": 256,
    "layers": 4,
    "steps": 3,  # timed, after those that compile; the median counts
    "threads": 1,
    "microbatch": 4096,
    "python": "",
    "seeds": [0, 1, 2],
    "learned_steps": 50,  # of the quickstart; 0: no runs
    "repeats": 3,
}
BACKENDS = ("mindspore", "torch")


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in BACKENDS}
    with tempfile.TemporaryDirectory() as folder:
        job = {**options, "file": str(Path(folder) / "samples.npz"), "folder": folder}
        np.savez(job["file"], **samples_of(job))
        for _ in range(int(options["repeats"])):
            for name in BACKENDS:
                rounds[name].append(in_process(name, job))
        learned = {str(seed): learn(job, seed) for seed in options["seeds"]} if options["learned_steps"] else {}
    mine, theirs = (rounds[name] for name in BACKENDS)
    speed = {name: summary([r["tokens_per_s"] for r in rounds[name]]) for name in BACKENDS}
    thrift = {name: summary([r["tokens_per_cpu_s"] for r in rounds[name]]) for name in BACKENDS}
    gaps = {key: max(_gap(mine[0][key], theirs[0][key])) for key in ("loss", "grad_norm")}
    return {
        "tokens_per_s": speed["mindspore"],
        "torch_tokens_per_s": speed["torch"],
        "ratio": speed["mindspore"]["median"] / speed["torch"]["median"],
        "tokens_per_cpu_s": thrift["mindspore"],
        "torch_tokens_per_cpu_s": thrift["torch"],
        "ratio_cpu": thrift["mindspore"]["median"] / thrift["torch"]["median"],
        "compile_s": summary([r["first_s"] for r in mine]),
        "loss_gap": gaps["loss"],
        "grad_norm_gap": gaps["grad_norm"],
        "accuracy": learned,
    }


def _gap(found: list[float], wanted: list[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(found, wanted, strict=True)]


def in_process(backend: str, job: Mapping[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, json.dumps({**job, "backend": backend})]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=peer_environment())
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def learn(job: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """What the quickstart has learned with either."""
    found: dict[str, Any] = {}
    for backend in BACKENDS:
        name = f"{backend}-{seed}"
        words = [f"seed={seed}", f"name={name}", f"folder={job['folder']}", "observe.progress=off"]
        words += [f"train.steps={job['learned_steps']}", f"threads={job['threads']}", f"learn.backend={backend}"]
        words += [f"learn.mindspore.python={job['python']}"] if job["python"] else []
        started = time.perf_counter()
        code = "from tidemill.cli import main; main()"
        subprocess.run([sys.executable, "-c", code, "train", "quickstart", *words], check=True, stdout=sys.stderr)
        summary_of = json.loads((Path(job["folder"]) / name / "summary.json").read_text())
        found |= {backend: summary_of["accuracy_after"], f"{backend}_wall_s": time.perf_counter() - started}
        found["before"] = summary_of["accuracy_before"]
    found["gap"] = found["mindspore"] - found["torch"]
    print(seed, found, file=sys.stderr, flush=True)
    return found


def cpu_seconds() -> float:
    """Of this process and those that it has started."""
    import psutil

    own = psutil.Process()
    return sum(sum(p.cpu_times()[:2]) for p in (own, *own.children(recursive=True)))


def measured(job: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    torch.set_num_threads(int(job["threads"]))
    from tidemill.algorithms.shared.registry import get
    from tidemill.learn.engine import Learner
    from tidemill.learn.mindspore.learner import MindSporeLearner
    from tidemill.models.attention import registry as attention
    from tidemill.recipe.config import Config

    config = Config.model_validate(
        {
            "algorithm": "grpo",
            "threads": job["threads"],
            "train": {"tokens_per_microbatch": job["microbatch"]},
            "learn": {"lr": 1e-4, "mindspore": {"python": job["python"]}},
        }
    )
    batch = batch_of(job)
    model = model_of(job, attention.NAME)
    if job["backend"] == "torch":
        learner = Learner(model, config, get("grpo"), 100)
    else:
        learner = MindSporeLearner(model, config, get("grpo"), 100, Path(job["folder"]) / "mindspore.log")
    seconds: list[float] = []
    spent: list[float] = []
    told: list[dict[str, float]] = []
    for _ in range(int(job["steps"]) + 1):
        started, before = time.perf_counter(), cpu_seconds()
        learner.accumulate(batch)
        told.append(learner.update())
        seconds.append(time.perf_counter() - started)
        spent.append(cpu_seconds() - before)
    learner.close()
    tokens = float(batch["tokens"].lengths.sum())
    return {
        "tokens_per_s": tokens / float(np.median(seconds[1:])),
        "tokens_per_cpu_s": tokens / float(np.median(spent[1:])),
        "first_s": seconds[0],
        "loss": [line["loss"] for line in told],
        "grad_norm": [line["grad_norm"] for line in told],
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(json.dumps(measured(json.loads(sys.argv[1]))))
