"""Bridges to other frameworks, measured beside those: TransferQueue's interface and TRL's trainers.

tidemill bench bridges --json --peer-python PATH   # an interpreter that has TransferQueue; default: this one
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ABOUT = "TransferQueue's interface beside TransferQueue, TRL's trainer with our engine beside its own generate"
OPTIONS: dict[str, Any] = {
    "parts": ["transfer_queue", "trl"],
    "peer_python": "",
    "queue": ["answers", "flows", "speeds"],
    "rounds": 5,  # of put and get
    "seeds": [0, 1, 2],
    "arms": ["generate", "rollout", "packed"],
    "steps": 16,
    "warmup": 2,  # steps that are not timed
    "prompts": 32,
    "samples": 8,
    "held_out": 200,
    "lr": 7e-5,
    "threads": 2,
    "limit_s": 1800.0,  # of one program
}
CASES = "tests.bridges.transfer_queue.run"
FLOW = "tests.bridges.transfer_queue.flow"
SIDES = ("theirs", "ours")


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    parts = {"transfer_queue": transfer_queue, "trl": trl}
    return {name: parts[name](options) for name in options["parts"]}


# -- TransferQueue ----------------------------------------------------------------------------------------------------


def transfer_queue(options: Mapping[str, Any]) -> dict[str, Any]:
    python = options["peer_python"] or os.environ.get("TIDEMILL_PEER_PYTHON") or sys.executable
    with tempfile.TemporaryDirectory(prefix="r") as ray_folder:

        def child(*words: str, **environment: str) -> Any:
            extra = {"RAY_TMPDIR": ray_folder, "TQ_LOGGING_LEVEL": "ERROR", **environment}
            return program([python, *words], options["limit_s"], extra)

        made: dict[str, Any] = {}
        for name in options["queue"]:
            made |= {"answers": answers, "flows": flows, "speeds": speeds}[name](child, options)
            print(json.dumps(made), file=sys.stderr, flush=True)
    return made


def answers(child: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    theirs, ours = (cases(child, side) for side in SIDES)
    differing = [name for name, told in theirs.items() if ours.get(name) != told]
    return {"cases": len(theirs), "differences": differing}


def flows(child: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    ran, killed = ({side: child("-m", FLOW, side, what, "--ray") for side in SIDES} for what in ("rows", "killed"))
    return {
        "dataflow_rows": len(ran["theirs"]["rows"]),
        "dataflow_is_same": ran["theirs"] == ran["ours"],
        "killed_consumer_rows": killed["ours"]["rows"],
        "killed_consumer_lost": {side: told["lost"] for side, told in killed.items()},
    }


def speeds(child: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    found = {kind: speed(child, kind, options["rounds"]) for kind in ("simple", "complex")}
    simple = found["simple"]
    return {"speeds": found, "put_ratio (>= 5)": simple["put_ratio"], "get_ratio (>= 10)": simple["get_ratio"]}


def cases(child: Any, side: str) -> dict[str, Any]:
    """All cases, in two systems: the environment of one has rows that count before they are written."""
    interval = {"TQ_CONTROLLER_GET_METADATA_CHECK_INTERVAL": "1"}
    found = child("-m", CASES, side, "--ray", **interval)
    return found | child("-m", CASES, side, "--ray", "prealloc", **interval, TQ_PRE_ALLOC_SAMPLE_NUM="4")


def speed(child: Any, kind: str, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for side in SIDES:
        told = child("benchmarks/_bridge_queue.py", side, kind, str(rounds))
        for what in ("put", "get"):
            times = [told["bytes"] / seconds / 1e9 for seconds in told[f"{what}_s"]]
            found[f"{side}_{what}_gbps"] = {"median": median(times), "runs": [round(t, 2) for t in times]}
    for what in ("put", "get"):
        ours, theirs = (found[f"{side}_{what}_gbps"]["median"] for side in ("ours", "theirs"))
        found[f"{what}_ratio"] = ours / theirs
    return found


# -- TRL --------------------------------------------------------------------------------------------------------------


def trl(options: Mapping[str, Any]) -> dict[str, Any]:
    """The quickstart's start model, trained by TRL's trainer: once as it is, once with our engine in it."""
    with tempfile.TemporaryDirectory() as folder:
        model = start_model(Path(folder), options)
        runs: dict[str, dict[str, Any]] = {arm: {} for arm in options["arms"]}
        for seed in options["seeds"]:
            for arm in options["arms"]:
                job = {**options, "arm": arm, "seed": seed, "model": str(model)}
                words = [sys.executable, "benchmarks/_bridge_trl.py", json.dumps(job)]
                runs[arm][str(seed)] = program(words, options["limit_s"], {"TRL_EXPERIMENTAL_SILENCE": "1"})
                print(arm, seed, runs[arm][str(seed)], file=sys.stderr, flush=True)
    found: dict[str, Any] = {
        "accuracy_before": next(iter(runs[options["arms"][0]].values()))["accuracy_before"],
        "accuracies": {arm: {seed: one["accuracy"] for seed, one in seeds.items()} for arm, seeds in runs.items()},
    }
    found["step_s"] = {arm: median(one["wall_s"] for one in seeds.values()) for arm, seeds in runs.items()}
    found["step_cpu_s"] = {arm: median(one["cpu_s"] for one in seeds.values()) for arm, seeds in runs.items()}
    if "generate" in runs and "rollout" in runs:
        first = runs["generate"]
        found["ratio"] = found["step_s"]["generate"] / found["step_s"]["rollout"]
        for arm in [arm for arm in runs if arm != "generate"]:
            gaps = [runs[arm][seed]["accuracy"] - first[seed]["accuracy"] for seed in first]
            found[f"points_{arm}"] = {"each": [round(100 * g, 1) for g in gaps], "mean": 100 * sum(gaps) / len(gaps)}
        if "packed" in runs:
            found["ratio_packed"] = found["step_s"]["generate"] / found["step_s"]["packed"]
    return found


def start_model(folder: Path, options: Mapping[str, Any]) -> Path:
    """Train the quickstart's warm start, as a folder that transformers opens."""
    tidemill = [sys.executable, "-m", "tidemill"]
    words = [f"folder={folder}", "name=start", "observe.progress=off", f"threads={options['threads']}"]
    for command in (
        [*tidemill, "train", "quickstart-sft", *words],
        [*tidemill, "export", str(folder / "start"), "--to", str(folder / "model")],
    ):
        subprocess.run(command, check=True, stdout=sys.stderr, env=environment({}))
    return folder / "model"


# -- programs ---------------------------------------------------------------------------------------------------------


def program(command: list[str], limit_s: float, extra: Mapping[str, str]) -> Any:
    """Run a program from the repository's root. Returns the JSON object that is its last line of output."""
    done = subprocess.run(
        command, cwd=ROOT, env=environment(extra), capture_output=True, text=True, timeout=limit_s, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        tail = " / ".join(done.stderr.strip().splitlines()[-5:])[-800:]
        raise RuntimeError(f"{' '.join(command[:4])} ended with {done.returncode}: {tail}")
    return json.loads(lines[-1])


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    from tidemill.bench import peer_environment

    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return {**peer_environment(), "PYTHONPATH": path, **extra}
