"""A run whose policy is a network, killed at any instant and resumed, computes the numbers of one never killed: its
environments go on where they were."""

from __future__ import annotations

import copy
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.runs import Disturb, assert_same_learning, measured, worker
from tests.faults.test_resume import KillAfter, in_child, numbers, resume_until_done
from tidemill.run import start as launch
from tidemill.run.watcher import Watcher

STEPS = 6
DRIFT = "tests.environment.vector.drift:Drift"
RECIPE: dict[str, Any] = {
    "name": "small",
    "device": "cpu",
    "threads": 1,
    "model": {"policy": {"kind": "mlp", "hidden": [16, 16], "normalise": ["observations", "rewards"]}},
    "environment": {"name": DRIFT, "film": False},
    "algorithm": {"name": "ppo", "critic": {"gamma": 0.95}},
    "rollout": {"max_new_tokens": 10},
    "train": {"steps": STEPS, "prompts_per_step": 2, "samples_per_prompt": 3},
    "learn": {"lr": 1e-2, "epochs": 2, "minibatch": 16},
    "eval": {"size": 4, "every": 2},
    "checkpoint": {"every": 2},
    "observe": {"tensorboard": False},
}


def changed(**over: Any) -> dict[str, Any]:
    made = copy.deepcopy(RECIPE)
    for section, values in over.items():
        made[section] = {**made.get(section, {}), **values} if isinstance(values, dict) else values
    return made


KINDS = {
    "ppo": RECIPE,
    "memory": changed(model={"policy": {"kind": "gru", "hidden": [16]}}),
    "processes of environments": changed(environment={"workers": 1}),
    "sac": changed(
        model={"policy": {"kind": "mlp", "hidden": [16, 16]}},
        algorithm={"name": "sac", "replay": {"updates": 3, "begin": 60, "capacity": 150}},
        learn={"epochs": 1},
    ),
    "dqn": changed(
        model={"policy": {"kind": "mlp", "hidden": [16, 16]}},
        environment={"args": {"real": False}},
        algorithm={"name": "dqn", "replay": {"updates": 3, "begin": 60, "capacity": 150}},
        learn={"epochs": 1},
    ),
    "duel": changed(
        model={"policy": {"kind": "mlp", "hidden": [16, 16]}},
        environment={"name": "connect_four", "players": 2, "goal": 1, "league": {"every": 2, "share": 0.6}},
        train={"samples_per_prompt": 4},
        eval={"size": 0},
    ),
}


def train(kind: str, folder: Path, watch: Watcher | None = None, **over: Any) -> None:
    launch.train({**KINDS[kind], **over, "folder": str(folder)}, watch=watch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [3, 4])
def test_a_killed_run_goes_on_with_the_same_numbers(tmp_path: Path, kind: str, step: int) -> None:
    """Step 3 is after the checkpoint of step 2, in the middle of most episodes; step 4 is before its own."""
    train(kind, tmp_path / "whole")
    assert in_child(lambda: train(kind, tmp_path / "killed", KillAfter(step))) == -signal.SIGKILL
    resume_until_done(tmp_path / "killed" / "small")
    assert numbers(tmp_path / "killed" / "small") == numbers(tmp_path / "whole" / "small")


def test_processes_of_environments_change_no_number(tmp_path: Path) -> None:
    train("ppo", tmp_path / "one")
    train("processes of environments", tmp_path / "more")
    assert numbers(tmp_path / "one" / "small") == numbers(tmp_path / "more" / "small")


class KillEnvironments(Watcher):
    """Kills the processes that step environments, after a step."""

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        for found in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = found.read_bytes().split(b"\0")
                parent = int((found.parent / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if b"tidemill.environment.vector.process" in words and parent == os.getpid():
                os.kill(int(found.parent.name), signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
def test_killed_environments_change_no_number(tmp_path: Path) -> None:
    train("ppo", tmp_path / "whole")
    train("processes of environments", tmp_path / "killed", KillEnvironments())
    assert numbers(tmp_path / "whole" / "small") == numbers(tmp_path / "killed" / "small")


def test_every_decision_is_learned_once(tmp_path: Path) -> None:
    """With epochs of one, what was made is what was learned, whatever was killed in between."""
    assert in_child(lambda: train("ppo", tmp_path, KillAfter(3))) == -signal.SIGKILL
    resume_until_done(tmp_path / "small")
    lines = [json.loads(line) for line in (tmp_path / "small" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "learned_tokens" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert all(line["learned_tokens"] == line["made_tokens"] == 60.0 for line in steps)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["learner-0", "rollout-0"])
@pytest.mark.parametrize("kind", ["ppo", "sac"])
def test_a_killed_worker_changes_no_number(tmp_path: Path, kind: str, victim: str) -> None:
    """Roles in processes; the learner, or the worker that steps environments, dies in the middle of a step."""
    cluster = {"executor": "processes", "lease_s": 1.5, "collective_s": 20.0, "stall_s": 60.0, "memory_mb": 256}
    train(kind, tmp_path / "whole")
    watch = Disturb(worker(victim), at_step=3)
    train(kind, tmp_path / "killed", watch, cluster=cluster)
    assert watch.killed
    assert_same_learning(*(measured(tmp_path / folder) for folder in ("whole", "killed")))
