"""Small networks on control tasks beside Stable-Baselines3: time and decisions until a task is solved, and environment
steps per second with 16 environments.

Ours are the recipes of `recipes/control/`; the peer has the settings of rl-baselines3-zoo (`_control_sb3.py`), in an
interpreter of its own. Both end with the first evaluation of deterministic episodes whose mean return reaches the goal;
both clocks run while the policy acts and learns, and stand still in evaluations and while processes start. Each has one
thread to compute with; seeds of the two sides take turns, so that other work on the machine hits both.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tidemill import bench
from tidemill.errors import ConfigError

ABOUT = "small networks: CartPole, pendulums, HalfCheetah, Connect Four, inventory; beside Stable-Baselines3"
OPTIONS: dict[str, Any] = {
    "parts": ["solve", "rate"],  # also: connect_four, inventory
    "tasks": ["cartpole", "inverted-pendulum", "pendulum", "half-cheetah"],
    "seeds": [0, 1, 2, 3, 4],
    "sb3": "",  # an interpreter that has stable-baselines3, gymnasium and mujoco; "": no peer
    "most_s": 1200.0,  # of one seed; more counts as not solved
    "rate_s": 10.0,  # of one round of steps per second; `repeats` rounds
    "rate_tasks": ["cartpole", "half-cheetah"],
    "environments": 16,
}
GYMNASIUM = {
    "cartpole": "CartPole-v1",
    "inverted-pendulum": "InvertedPendulum-v5",
    "pendulum": "Pendulum-v1",
    "half-cheetah": "HalfCheetah-v5",
}
PEER = Path(__file__).with_name("_control_sb3.py")
QUIET = ("observe.progress=off", "observe.tensorboard=false", "checkpoint.every=0", "eval.before=false")
QUIET = (*QUIET, "eval.after=false", "environment.film=false")


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    unknown = [task for task in (*options["tasks"], *options["rate_tasks"]) if task not in GYMNASIUM]
    if unknown:
        raise ConfigError(f"bench control knows no task {unknown[0]}", f"there are {', '.join(GYMNASIUM)}")
    parts = {"solve": solve, "rate": rate, "connect_four": connect_four, "inventory": inventory}
    result: dict[str, Any] = {"peers": {"sb3": {}} if options["sb3"] else {}}
    for name in options["parts"]:
        own, peer = parts[name](options)
        result |= own
        if peer:
            result["peers"]["sb3"] |= peer
    return result


# Until solved


def solve(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    ours: dict[str, Any] = {"seconds": {}, "steps": {}, "solved": {}}
    peer: dict[str, Any] = {"seconds": {}, "steps": {}, "solved": {}}
    ratios = {}
    for task in options["tasks"]:
        own: list[dict[str, Any]] = []
        other: list[dict[str, Any]] = []
        for seed in options["seeds"]:
            own.append(solved_by_us(task, seed, float(options["most_s"])))
            said(task, seed, "tidemill", own[-1])
            if options["sb3"]:
                other.append(solved_by_peer(options["sb3"], task, seed, float(options["most_s"])))
                said(task, seed, "sb3", other[-1])
        for found, rows in ((ours, own), (peer, other)):
            for key in ("seconds", "steps", "solved"):
                found[key][task] = {str(seed): row[key] for seed, row in zip(options["seeds"], rows)}
            if rows:
                found |= {f"{task}_median_{key}": median(rows, key) for key in ("seconds", "steps")}
        if other:
            ratios[task] = median(other, "seconds") / median(own, "seconds")
    return {**ours, "sb3_seconds_over_ours": ratios}, peer if options["sb3"] else {}


def solved_by_us(task: str, seed: int, most_s: float) -> dict[str, Any]:
    """One run in a process of its own; its clock is that of its steps."""
    metrics, summary = trained(f"control/{task}", (f"seed={seed}", *QUIET), most_s)
    seen = [m for m in metrics if "eval/reward" in m]
    return {
        "solved": bool(summary.get("is_early")),
        "steps": int(sum(m.get("made_tokens", 0) for m in metrics)),
        "seconds": round(sum(m.get("time/step", 0.0) for m in metrics), 3),
        "return": round(seen[-1]["eval/reward"], 2) if seen else None,
    }


def trained(recipe: str, settings: Sequence[str], most_s: float, keep: Path | None = None) -> tuple[list[Any], Any]:
    """Metrics and summary of a run, which is ended as Ctrl-C would end it after `most_s`."""
    with tempfile.TemporaryDirectory(prefix="tidemill-control-") as made:
        folder = keep or Path(made)
        command = [sys.executable, "-c", CHILD, recipe, json.dumps([f"folder={folder}", "name=run", *settings])]
        process = subprocess.Popen(command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            process.wait(most_s + START_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(60)
        if process.returncode > 0:
            raise RuntimeError(f"the run of {recipe} ended with status {process.returncode}")
        measured = folder / "run" / "metrics.jsonl"
        lines = measured.read_text().splitlines() if measured.exists() else []  # none: ended before its first step
        told = folder / "run" / "ended.json"
        return [json.loads(line) for line in lines], json.loads(told.read_text()) if told.exists() else {}


START_S = 300.0  # to import everything, on a busy machine
CHILD = """
import json, sys
from pathlib import Path
from tidemill.run.start import train
settings = json.loads(sys.argv[2])
ended = train(sys.argv[1], settings)
Path("run/ended.json").write_text(json.dumps({"is_early": ended.is_early, "steps": ended.steps}))
"""


def solved_by_peer(python: str, task: str, seed: int, most_s: float) -> dict[str, Any]:
    from tidemill.recipe import load as recipes

    config = recipes.load(f"control/{task}").config
    environments = config.train.prompts_per_step * config.train.samples_per_prompt
    asked = {
        "task": GYMNASIUM[task],
        "algorithm": "ppo",
        "seed": seed,
        "goal": config.train.stop_at_reward,
        "every": config.eval.every * environments * config.rollout.max_new_tokens,
        "episodes": config.eval.size,
        "most_s": most_s,
    }
    return of_peer(python, asked)


def of_peer(python: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tidemill-control-") as folder:
        done = subprocess.run(
            [python, str(PEER), json.dumps(asked)],
            stdout=subprocess.PIPE, text=True, check=True, cwd=folder,
            env={**bench.peer_environment(), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# Steps per second


def rate(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of acting and learning, and of acting alone. Both sides do the same work: two networks of 64 and 64, 10 passes
    over 128 decisions of each environment, 64 at a time."""
    ours: dict[str, Any] = {"env_steps_per_s": {}, "acting_steps_per_s": {}}
    peer: dict[str, Any] = {"env_steps_per_s": {}, "acting_steps_per_s": {}}
    ratios: dict[str, dict[str, float]] = {"env_steps_per_s": {}, "acting_steps_per_s": {}}
    for task in options["rate_tasks"]:
        for key, learns in (("env_steps_per_s", True), ("acting_steps_per_s", False)):
            own, other = [], []
            for _ in range(int(options["repeats"])):
                own.append(our_rate(task, options, learns))
                if options["sb3"]:
                    other.append(peer_rate(task, options, learns))
                print(task, key, own[-1], other[-1:], file=sys.stderr, flush=True)
            ours[key][task] = bench.summary(own)
            if other:
                peer[key][task] = bench.summary(other)
                ratios[key][task] = statistics.median(a / b for a, b in zip(own, other))
    return {**ours, "rate_over_sb3": ratios}, peer if options["sb3"] else {}


def our_rate(task: str, options: Mapping[str, Any], learns: bool) -> float:
    """The first third of the steps warms up. Acting alone: an update of one pass over one minibatch is left out of the
    clock, by the time that the run's own timeline gives it."""
    steps = 12
    wanted = float(options["rate_s"])
    while True:
        settings = (f"train.samples_per_prompt={options['environments']}", f"train.steps={steps}", "eval.size=0", *SAME)
        metrics, _ = trained(f"control/{task}", (*settings, *QUIET), 600.0)
        timed = [m for m in metrics if "time/step" in m][steps // 3 :]
        spent = sum(m["time/step"] if learns else m["time/rollout"] for m in timed)
        if spent > wanted / 2 or steps > 20_000:
            return sum(m["made_tokens"] for m in timed) / spent
        steps = int(steps * min(20.0, 1.3 * wanted / max(spent, 1e-3)))


SAME = ("rollout.max_new_tokens=128", "learn.epochs=10", "learn.minibatch=64", "train.stop_at_reward=none")


def peer_rate(task: str, options: Mapping[str, Any], learns: bool) -> float:
    """The faster of environments in the learner's process and in processes of their own."""
    asked = {
        "what": "rate", "task": GYMNASIUM[task], "algorithm": "ppo", "seed": 0, "envs": options["environments"],
        "seconds": options["rate_s"], "learns": learns,
        "work": {"n_steps": 128, "batch_size": 64, "n_epochs": 10, "policy_kwargs": {"net_arch": [64, 64]}},
    }  # fmt: skip
    return max(of_peer(options["sb3"], {**asked, "processes": p})["env_steps_per_s"] for p in (False, True))


# Tasks whose best players and rules are known


AGAINST = "eval/against_"
AT_THE_END = (*QUIET[:4], "eval.size=500", "eval.every=1000000", "environment.film=false")


def connect_four(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    shares: dict[str, dict[str, float]] = {}
    for seed in options["seeds"]:
        began = time.perf_counter()
        metrics, _ = trained(
            "control/connect-four",
            (f"seed={seed}", *AT_THE_END),
            3600.0,
        )
        last = next(m for m in reversed(metrics) if "eval/against_random" in m)
        found = {
            key.removeprefix("eval/against_"): value for key, value in last.items() if key.startswith("eval/against_")
        }
        shares[str(seed)] = {**found, "wall_s": time.perf_counter() - began}
        said("connect_four", seed, "tidemill", shares[str(seed)])
    return {"connect_four": shares}, {}


def inventory(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Costs of a period, exactly, by the chain of states; no simulation."""
    from tidemill.environment.tasks.inventory import Inventory
    from tidemill.run.trained import open_trained

    model = Inventory(1).model()
    best, _ = model.best()
    costs = {}
    for seed in options["seeds"]:
        with tempfile.TemporaryDirectory(prefix="tidemill-inventory-") as folder:
            settings = (f"seed={seed}", *QUIET[:2], "eval.size=0", "environment.film=false")
            began = time.perf_counter()
            trained("control/inventory", settings, 3600.0, Path(folder))
            seconds = time.perf_counter() - began
            cost = model.cost(model.orders_of(open_trained(Path(folder) / "run").loaded.model))
        costs[str(seed)] = {"cost": cost, "above_best": cost / best - 1.0, "wall_s": seconds}
        said("inventory", seed, "tidemill", costs[str(seed)])
    return {"inventory": {"best": best, "seeds": costs}}, {}


def median(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(statistics.median(row[key] for row in rows))


def said(task: str, seed: int, who: str, found: Mapping[str, Any]) -> None:
    shown = {k: v for k, v in found.items() if k != "curve"}
    print(task, seed, who, shown, file=sys.stderr, flush=True)
