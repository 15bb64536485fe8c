"""A run killed at any instant and resumed computes the numbers of one never killed."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidemill.errors import TidemillError
from tidemill.run import start as launch
from tidemill.run.watcher import Watcher

STEPS = 6
RECIPE: dict[str, Any] = {
    "name": "small",
    "device": "cpu",
    "threads": 1,
    "model": {"tiny": {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 48, "window": 64}},
    "data": {"source": "chain", "args": {"terms": 3, "max_total": 9}, "max_prompt_tokens": 16},
    "rollout": {"max_new_tokens": 8},
    "rewards": "last_number",
    "train": {"steps": STEPS, "prompts_per_step": 4, "samples_per_prompt": 4, "updates_per_step": 2},
    "learn": {"lr": 1e-2},
    "eval": {"size": 8, "every": 2},
    "checkpoint": {"every": 1},
    "observe": {"tensorboard": False},
}
# Children are forked, not spawned: importing torch anew would take longer than the run.
FORK = multiprocessing.get_context("fork")


class KillAfter(Watcher):
    """A signal right after a step is recorded: before its checkpoint, or before the run's end."""

    def __init__(self, step: int, how: signal.Signals = signal.SIGKILL) -> None:
        self.step, self.how = step, how

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        if step == self.step:
            os.kill(os.getpid(), self.how)


def in_child(work: Callable[[], Any], kill_after_s: float | None = None) -> int | None:
    child = FORK.Process(target=work)
    child.start()
    child.join(kill_after_s)
    if child.is_alive() and kill_after_s is not None:
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
    child.join(120)
    return child.exitcode


def numbers(run: Path) -> list[dict[str, Any]]:
    """Everything a run measured that is not about time."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    about_time = ("time/", "idle/", "machine/", "cost/")
    return [{k: v for k, v in line.items() if not k.startswith(about_time) and "per_s" not in k} for line in lines]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    started = time.monotonic()
    assert in_child(lambda: launch.train({**RECIPE, "folder": str(folder)})) == 0
    return numbers(folder / "small"), time.monotonic() - started


def resume_until_done(run: Path) -> None:
    """In this process: a failure shows its own traceback."""
    with contextlib.suppress(launch.NothingLeft):
        launch.resume(run)


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(10))
def test_killed_at_a_random_moment_and_resumed(
    tmp_path: Path, undisturbed: tuple[list[dict[str, Any]], float], moment: int
) -> None:
    expected, seconds = undisturbed
    seed = int(os.environ.get("TIDEMILL_SEED", str(moment)))
    delay = random.Random(seed).uniform(0.02, 0.95) * seconds
    in_child(lambda: launch.train({**RECIPE, "folder": str(tmp_path)}), kill_after_s=delay)
    run = tmp_path / "small"
    if not (run / "config.yaml").exists():
        pytest.skip(f"killed after {delay:.2f} s, before the run had a folder")
    resume_until_done(run)
    assert numbers(run) == expected, f"seed {seed}, killed after {delay:.2f} s"


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3, STEPS])
def test_killed_at_a_step_boundary_and_in_the_last_step(
    tmp_path: Path, undisturbed: tuple[list[dict[str, Any]], float], step: int
) -> None:
    code = in_child(lambda: launch.train({**RECIPE, "folder": str(tmp_path)}, watch=KillAfter(step)))
    assert code == -signal.SIGKILL
    resume_until_done(tmp_path / "small")
    assert numbers(tmp_path / "small") == undisturbed[0]


def test_a_finished_run_says_there_is_nothing_left_to_do(tmp_path: Path) -> None:
    short = {**RECIPE, "folder": str(tmp_path), "train": {**RECIPE["train"], "steps": 1}}
    launch.train(short)
    with pytest.raises(launch.NothingLeft, match="nothing left to do: its 1 step is done"):
        launch.resume(tmp_path / "small")


def test_a_truncated_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path: Path) -> None:
    expected = {**RECIPE, "folder": str(tmp_path / "a")}
    launch.train(expected)
    in_child(lambda: launch.train({**RECIPE, "folder": str(tmp_path / "b")}, watch=KillAfter(4)))
    run = tmp_path / "b" / "small"
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    weights = next(newest.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    said: list[str] = []

    class Listen(Watcher):
        def noted(self, message: str) -> None:
            said.append(message)

    launch.resume(run, watch=Listen())
    assert any(newest.name in s and "going back to step-000002" in s for s in said), said
    assert numbers(run) == numbers(tmp_path / "a" / "small")


def test_interrupted_by_the_user_it_saves_and_can_be_resumed(tmp_path: Path) -> None:
    summary = launch.train({**RECIPE, "folder": str(tmp_path / "a")}, watch=KillAfter(2, signal.SIGINT))
    assert summary.is_stopped and summary.steps == 2
    launch.resume(tmp_path / "a" / "small")
    launch.train({**RECIPE, "folder": str(tmp_path / "b")})
    assert numbers(tmp_path / "a" / "small") == numbers(tmp_path / "b" / "small")


def test_two_processes_cannot_write_one_run(tmp_path: Path) -> None:
    class Intrude(Watcher):
        def stepped(self, step: int, metrics: dict[str, float]) -> None:
            with pytest.raises(TidemillError):
                launch.resume(tmp_path / "small")

    launch.train({**RECIPE, "folder": str(tmp_path), "train": {**RECIPE["train"], "steps": 1}}, watch=Intrude())
