"""A gateway that dies in mid-conversation, and what many faulty programs leave behind: nothing."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.runs import Disturb, assert_same_learning, measured, train, worker
from tests.serve.test_programs import AGENTS, folder, playing  # noqa: F401  fixtures
from tidemill.environment.api import Task

STEPS = {"steps": 3, "prompts_per_step": 2, "samples_per_prompt": 4, "updates_per_step": 1}


def slow_program(log: Path) -> dict:
    """A run whose conversations take a while."""
    return {
        "environment": {"program": f"{AGENTS}:slowly", "args": {"log": str(log)}, "timeout_s": 60},
        "rewards": "environment",
        "rollout": {"max_new_tokens": 24},
        "train": STEPS,
        "eval": {"size": 2, "before": False, "every": 0},
    }


def noted(log: Path) -> tuple[list[str], list[str]]:
    lines = log.read_text().splitlines()
    began = [line.removeprefix("began ") for line in lines if line.startswith("began")]
    return began, [line.removeprefix("ended ") for line in lines if line.startswith("ended")]


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def assert_made_up_for(tmp_path: Path, cluster: dict, **rollouts) -> None:
    """Kill a rollout worker, with the endpoint and the programs' zygote, while conversations are under way."""
    train(tmp_path / "calm", cluster={"executor": "local"}, **slow_program(tmp_path / "calm.log"))
    watch = Disturb(worker("rollout-0"), after_s=0.25)
    train(tmp_path / "wild", watch, cluster=cluster, **slow_program(tmp_path / "wild.log"))
    assert_same_learning(measured(tmp_path / "wild"), measured(tmp_path / "calm"))
    assert any("rollout-0 is lost" in said for said in watch.said)
    began, ended = noted(tmp_path / "wild.log")
    assert len(began) > len(ended)  # some were in the middle
    orphans = {int(line.split()[0]) for line in began} | {int(line.split()[1]) for line in began}
    deadline = time.monotonic() + 20
    while any(is_alive(pid) for pid in orphans):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_gateway_killed_in_mid_conversation_costs_no_sample_and_leaves_no_program(tmp_path):
    assert_made_up_for(tmp_path, {"rollouts": 2})


def test_faulty_programs_leave_no_memory_behind(playing):  # noqa: F811
    kinds = ["good", "raise", "crash", "disconnect", "broken", "body"]
    sizes, files = [], []
    for _ in range(3):
        done, _, _ = playing("fault", [Task(answer=kinds[i % 6]) for i in range(36)], max_tokens=40, max_body=1 << 16)
        assert len(done) == 36
        gc.collect()
        sizes.append(psutil.Process().memory_info().rss)
        files.append(len(os.listdir("/proc/self/fd")))
    assert sizes[2] - sizes[1] < 24 << 20, sizes
    # Each kind of fault came six times a round, so a descriptor lost by any of them counts six. Fewer are other
    # tests' threads in this process.
    assert files[2] - files[1] < 6, files
