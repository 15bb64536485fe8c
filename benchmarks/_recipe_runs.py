"""Run recipes with `tidemill train`, several side by side where a device is large enough, and read the results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidemill.errors import TidemillError


@dataclass(frozen=True)
class Job:
    """One run: a recipe, a seed, and settings beside the recipe's own."""

    recipe: str
    seed: int
    settings: tuple[str, ...] = ()
    label: str = ""

    @property
    def name(self) -> str:
        return f"{self.label or self.recipe.replace('/', '-')}-{self.seed}"


@dataclass(frozen=True)
class Came:
    """What a run came to: its metrics, and the seconds since its command was given."""

    job: Job
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    seconds: float
    curve: list[dict[str, float]] = field(default_factory=list)

    @property
    def before(self) -> dict[str, float]:
        return self.curve[0]

    @property
    def after(self) -> dict[str, float]:
        return self.curve[-1]


def run_all(jobs: Sequence[Job], folder: Path, at_once: int, limit_s: float) -> list[Came]:
    """Run every job, `at_once` side by side. A job that is still running `limit_s` after the first began is stopped as
    Ctrl-C would stop it; what it had come to is in its result."""
    deadline = time.monotonic() + limit_s
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda job: run_one(job, folder, deadline), jobs))


def run_one(job: Job, folder: Path, deadline: float) -> Came:
    words = [f"folder={folder}", f"name={job.name}", f"seed={job.seed}", "observe.tensorboard=false", *job.settings]
    command = [sys.executable, "-m", "tidemill", "train", job.recipe, *words, "observe.progress=off"]
    place, log = folder / job.name, folder / f"{job.name}.log"
    began = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=dict(os.environ))
        try:
            process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(60)
    if not (place / "metrics.jsonl").exists():
        raise TidemillError(f"{job.name} made no step; the end of its output:\n{_end(log)}", f"see {log}")
    came = read(job, place, time.perf_counter() - began)
    tell(came)
    return came


def read(job: Job, place: Path, seconds: float = 0.0) -> Came:
    metrics = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    summary = place / "summary.json"
    return Came(job, metrics, json.loads(summary.read_text()) if summary.exists() else {}, seconds, curve(metrics))


def curve(metrics: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Each evaluation with the step, the made tokens and the seconds of training that were spent before it."""
    found: list[dict[str, float]] = []
    tokens = seconds = 0.0
    for line in metrics:
        tokens += line.get("made_tokens", 0.0)
        seconds += line.get("time/step", 0.0)
        if "eval/accuracy" in line:
            shares = {key.removeprefix("eval/"): line[key] for key in line if key.startswith("eval/pass@")}
            found.append(
                {"step": line["step"], "tokens": tokens, "seconds": seconds, "greedy": line["eval/accuracy"], **shares}
            )
    return found


def tell(came: Came) -> None:
    """Say on standard error what a run came to, as soon as it is known."""
    ends = "; ".join(f"step {one['step']}: greedy {one['greedy']:.3f}" for one in (came.curve[:1] + came.curve[-1:]))
    print(f"{came.job.name}: {ends} ({came.seconds:.0f} s)", file=sys.stderr, flush=True)


def base(model: str, recipe: str, size: int, samples: int, settings: Sequence[str] = ()) -> dict[str, float]:
    """Measure an untrained model on a recipe's held-out problems."""
    command = [sys.executable, "-m", "tidemill", "eval", model, "--recipe", recipe, "--json", "--size", str(size)]
    words = [*command, "--samples", str(samples), *settings]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise TidemillError(f"`tidemill eval {model}` failed:\n{done.stderr[-2000:]}", "see the message above")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    shares = {key.removeprefix("eval/"): found[key] for key in found if key.startswith("eval/pass@")}
    return {"greedy": found["eval/accuracy"], **shares}


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:] if log.exists() else "(no output)"
