"""Schedules side by side: `sync`, `streamed` and `async` (staleness 2), in samples/s and in idle time by role.

Rollout and learning have a simulated device each. A decoding step takes `decode_ms`, whatever the batch, as on an
accelerator that reads all weights for each token; a token learned from takes `learn_us`. The real engine and the real
learner do their work inside that time, on a model small enough to fit into it, so what shows is who waits for whom and
not how many cores are free. One prompt in `long_every` has responses some ten times longer than the others: the tail
that everybody waits for. Rewards, the dock and the weight flow are the real ones. All three schedules run the same job
on the same devices.

Accuracy is the quickstart's own, nothing simulated: `quickstart-async` from one warm start, under `sync` and `async`.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from tidemill.bench import summary

ABOUT = "sync, streamed and async with a simulated long tail: samples/s, idle time by role, accuracy"
OPTIONS: dict[str, Any] = {
    "steps": 6,  # timed, after `warmup` steps that are not; the run goes on behind them, so that nothing runs dry
    "warmup": 2,
    "staleness": 2,
    "decode_ms": 40.0,
    "learn_us": 1500.0,
    "prompts": 16,
    "samples": 4,
    "long_every": 16,
    "microbatch": 256,  # tokens; `streamed` learns in these
    "threads": 1,  # of the learner, and of rollout
    "accuracy_steps": 80,  # 0: no accuracy
    "seeds": [0],
    "at_once": 1,  # seeds trained side by side, where there are cores for it
    "problems": 1000,  # held out: their answers measure to about half a point near the top
    "model": "",  # accuracy: a folder to start from; "": the quickstart's warm start is made first
}
SCHEDULES = ("sync", "streamed", "async")
SHORT, LONG = (4, 12), (60, 80)  # tokens of a response


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    """`--repeats 0`: accuracy alone."""
    result = speeds(options) if int(options["repeats"]) else {}
    return result | (accuracies(options) if options["accuracy_steps"] else {})


def speeds(options: Mapping[str, Any]) -> dict[str, Any]:
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in SCHEDULES}
    for _ in range(int(options["repeats"])):
        for name in SCHEDULES:
            rounds[name].append(in_process({**options, "part": "speed", "schedule": name}))
            print(name, rounds[name][-1], file=sys.stderr, flush=True)
    result: dict[str, Any] = {name: merged(rounds[name]) for name in SCHEDULES}
    for name in SCHEDULES:
        result[f"{name}_samples_per_s"] = result[name]["samples_per_s"]
        for role, idle in result[name]["idle"].items():
            result[f"{name}_idle_{role}"] = idle
    for name in SCHEDULES[1:]:  # round by round: what else the machine does hits neighbours alike
        pairs = zip(rounds[name], rounds["sync"], strict=True)
        result[f"{name}_over_sync"] = statistics.median(a["samples_per_s"] / b["samples_per_s"] for a, b in pairs)
    return result


def merged(rounds: list[dict[str, float]]) -> dict[str, Any]:
    middle = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    return {
        "samples_per_s": summary([r["samples_per_s"] for r in rounds]),
        "idle": {key.removeprefix("idle/"): value for key, value in middle.items() if key.startswith("idle/")},
        **{key: value for key, value in middle.items() if "/" not in key and key != "samples_per_s"},
    }


def in_process(job: Mapping[str, Any]) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, json.dumps(job)], check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# Speed


class SimulatedDevice:
    """An engine whose decoding steps take at least `step_s`, and whose responses are as long as they are told to be."""

    def __init__(self, engine: Any, step_s: float, long_every: int) -> None:
        self._engine, self._step_s, self._long_every = engine, step_s, long_every

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Any) -> None:
        sampling = replace(request.sampling, ignore_eos=True)
        self._engine.submit(replace(request, sampling=sampling, limits=lengths(request, self._long_every)))

    def step(self) -> Any:
        began = time.perf_counter()
        done = self._engine.step()
        time.sleep(max(0.0, self._step_s - (time.perf_counter() - began)))
        return done


def lengths(request: Any, long_every: int) -> Sequence[int]:
    """Of each response: by the prompt's number alone, so that every schedule has the same."""
    draw = random.Random(request.id)
    span = LONG if request.id % long_every == 0 else SHORT
    return [draw.randint(*span) for _ in range(request.n)]


def speed(job: Mapping[str, Any]) -> dict[str, float]:
    from tidemill.cluster.worker import build
    from tidemill.run import start as launch
    from tidemill.run.loop import Watcher

    make = build.make_engine

    def simulated(*told: Any) -> Any:
        return SimulatedDevice(make(*told), job["decode_ms"] / 1000, job["long_every"])

    class SimulatedLearner(build.Learner):
        def accumulate(self, batch: Any) -> None:
            began = time.perf_counter()
            super().accumulate(batch)
            takes = float(batch["tokens"].lengths.sum()) * job["learn_us"] / 1e6
            time.sleep(max(0.0, takes - (time.perf_counter() - began)))

    build.make_engine, build.Learner = simulated, SimulatedLearner  # type: ignore[misc]
    laps: list[dict[str, float]] = []

    class Laps(Watcher):
        def stepped(self, step: int, metrics: dict[str, float]) -> None:
            laps.append({**metrics, "at": time.perf_counter()})

    with tempfile.TemporaryDirectory() as folder:
        launch.train(
            "quickstart-worked",  # the quickstart's job on a smaller model
            [
                "model.tiny={hidden: 48, layers: 2, heads: 4, kv_heads: 2, intermediate: 96, window: 256}",
                "algorithm.name=grpo",
                "algorithm.aggregation=token_mean",
                "data.args={terms: [2, 6], max_total: 9}",
                # Differs within every group: rows without an advantage would cost no backward pass.
                "rewards=[{function: length, args: {target: 200, unit: characters}}]",
                f"train.steps={job['warmup'] + job['steps'] + job['staleness'] + 1}",
                f"train.prompts_per_step={job['prompts']}",
                f"train.samples_per_prompt={job['samples']}",
                f"train.tokens_per_microbatch={job['microbatch']}",
                f"rollout.max_new_tokens={LONG[1]}",
                f"rollout.concurrent={4 * job['prompts'] * job['samples']}",
                "learn.lr=1e-5",
                f"flow.schedule={job['schedule']}",
                f"flow.max_staleness={job['staleness']}",
                f"flow.placement={job.get('placement', 'separated')}",
                f"flow.carry_over={job.get('carry_over', 0)}",
                "eval.size=0",
                "checkpoint.every=0",
                "observe.tensorboard=false",
                f"threads={job['threads']}",
                f"folder={folder}",
                "name=speed",
            ],
            watch=Laps(),
        )
    timed = laps[job["warmup"] : job["warmup"] + job["steps"]]
    seconds = timed[-1]["at"] - laps[job["warmup"] - 1]["at"]
    kept = {name: name for name in ("staleness", "staleness_max", "carried_groups")}
    return {
        "samples_per_s": job["steps"] * job["prompts"] * job["samples"] / seconds,
        "step_s": seconds / job["steps"],
        **{key: mean(timed, key) for key in timed[0] if key.startswith("idle/")},
        **{name: mean(timed, key) for name, key in kept.items() if key in timed[0]},
    }


def mean(laps: list[dict[str, float]], key: str) -> float:
    return statistics.fmean(lap.get(key, 0.0) for lap in laps)


# Accuracy


def accuracies(options: Mapping[str, Any]) -> dict[str, Any]:
    """`streamed` computes the steps of `sync` (a test holds them together), so it is not trained again."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(int(options["at_once"])) as pool:
        pairs = list(pool.map(lambda seed: both({**options, "seed": seed, "folder": folder}), options["seeds"]))
    after = {name: [pair[name] for pair in pairs] for name in ("sync", "async")}
    points = [100 * (pair["async"] - pair["sync"]) for pair in pairs]
    return {
        "sync_accuracy": statistics.fmean(after["sync"]),
        "async_accuracy": statistics.fmean(after["async"]),
        "async_accuracy_points": statistics.fmean(points),
        "points_by_seed": points,
        "accuracy_by_seed": after,
    }


def both(job: Mapping[str, Any]) -> dict[str, float]:
    """One seed under `sync` and under `async`, from the same warm start."""
    found = {}
    for name in ("sync", "async"):
        told = in_process({**job, "part": "accuracy", "schedule": name})
        print(name, job["seed"], told, file=sys.stderr, flush=True)
        found[name] = told["accuracy_after"]
    return found


def accuracy(job: Mapping[str, Any]) -> dict[str, float]:
    from tidemill.run import start as launch

    run = f"{job['schedule']}-{job['seed']}"
    made = Path(job["folder"]) / f"sync-{job['seed']}" / "warm_start" / "model"  # by the first, used by both
    warm = job["model"] or ("" if job["schedule"] == "sync" else made)
    found = launch.train(
        "quickstart-async",
        [
            f"train.steps={job['accuracy_steps']}",
            f"flow.schedule={job['schedule']}",
            f"flow.max_staleness={job['staleness']}",
            "eval.every=0",
            "eval.before=false",
            f"eval.size={job['problems']}",
            f"data.held_out={job['problems']}",
            f"seed={job['seed']}",
            f"folder={job['folder']}",
            f"name={run}",
            f"threads={job['threads']}",
            *([f"model.path={warm}"] if warm else []),
        ],
    )
    lines = (Path(job["folder"]) / run / "metrics.jsonl").read_text().splitlines()
    ages = [line["staleness"] for line in map(json.loads, lines) if "staleness" in line]
    assert found.accuracy_after is not None
    return {
        "accuracy_after": found.accuracy_after,
        "seconds": found.seconds,
        "staleness": statistics.fmean(ages) if ages else 0.0,
    }


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps({"speed": speed, "accuracy": accuracy}[asked["part"]](asked)))
