"""Seconds from the command to the first rollout token: in one process, on processes of this machine, on Ray.

Each is a fresh interpreter that trains the quickstart's model for one step without an evaluation; what is timed is all
that a user waits for, imports included.

    tidemill bench start --json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from tidemill.bench import summary

ABOUT = "seconds from the command to the first rollout token: local, processes, ray"
OPTIONS: dict[str, Any] = {"executors": ["local", "processes", "ray"], "learners": 1, "rollouts": 1}

CODE = """
import json, sys, time
began, folder, cluster = float(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
from tidemill.run import start as launch
from tidemill.run.loop import Watcher

found = {}

class Watch(Watcher):
    def started(self, workers, first_step):
        found["ready_s"] = time.time() - began
        found["workers"] = workers

recipe = {
    "name": "start", "folder": folder, "device": "cpu", "threads": 1, "model": {"tiny": {}}, "cluster": cluster,
    "data": {"source": "chain", "args": {"terms": 3, "max_total": 9}, "max_prompt_tokens": 16},
    "rollout": {"max_new_tokens": 8}, "rewards": "last_number",
    "train": {"steps": 1, "prompts_per_step": 4, "samples_per_prompt": 4},
    "eval": {"size": 0, "before": False, "after": False}, "observe": {"tensorboard": False, "progress": "off"},
}
launch.train(recipe, watch=Watch())
found["first_token_s"] = found["workers"].first_token_s - began
del found["workers"]
print(json.dumps(found))
"""


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in options["executors"]}
    for _ in range(int(options["repeats"])):
        for name in options["executors"]:
            rounds[name].append(once(name, options))
    return {f"{name}_first_token_s": summary([r["first_token_s"] for r in made]) for name, made in rounds.items()}


def once(executor: str, options: Mapping[str, Any]) -> dict[str, float]:
    cluster = {"executor": executor, "learners": int(options["learners"]), "rollouts": int(options["rollouts"])}
    with tempfile.TemporaryDirectory(prefix="tm-start-") as folder:
        command = [sys.executable, "-c", CODE, str(time.time()), folder, json.dumps(cluster)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
