"""Carry-over: a step takes the groups that finish first, nothing is lost or learned twice, and nothing gets too old."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.faults.test_resume import FORK, RECIPE, in_child
from tests.flow.test_async import learned, lines, noted_resume, samples, slow_down, write_down
from tests.flow.test_schedules import run

from tidemill.flow.carry import choose
from tidemill.recipe.load import load
from tidemill.rollout.native.engine import NativeEngine
from tidemill.run import start as launch

LONG = {"rollout": {"max_new_tokens": 40}, "data": {"max_prompt_tokens": 16}}
CARRY = {"schedule": "sync", "carry_over": 0.5, "max_staleness": 2}


def uneven(monkeypatch: Any = None) -> None:
    """Every fifth prompt's samples run to the limit, the others end early."""
    submit = NativeEngine.submit

    def told(engine: NativeEngine, request: Any) -> None:
        draw = random.Random(request.id)
        limits = [40 if request.id % 5 == 0 else draw.randint(2, 6) for _ in range(request.n)]
        submit(engine, replace(request, limits=limits))

    monkeypatch.setattr(NativeEngine, "submit", told) if monkeypatch else setattr(NativeEngine, "submit", told)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_groups_are_chosen_so_that_none_ever_gets_too_old(limit: int) -> None:
    """Against random finishing times: whatever order groups finish in, a step that can wait for them finds its own."""
    seed = int(os.environ.get("TIDEMILL_SEED", str(time.time_ns() % 10**6)))
    print("seed", seed)
    draw, per_step, steps = random.Random(seed), 4, 30
    for _ in range(20):
        entered: dict[int, int] = {}
        total, most = 0, per_step * (1 + limit)
        for step in range(1, steps + 1):
            while len(entered) < min(most, per_step * (steps - step + 1)):
                entered[total], total = step, total + 1
            finished: list[int] = []
            rest = draw.sample(list(entered), len(entered))
            while not (chosen := choose(sorted(finished), entered, per_step, step, limit, per_step)):
                finished.append(rest.pop())  # raises when all have finished and none could be chosen
            assert len(chosen) == per_step
            for group in chosen:
                assert step - entered.pop(group) <= limit
        assert not entered


def test_a_tail_is_carried_over_and_no_older_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uneven(monkeypatch)
    folder = run(tmp_path, train={"steps": 6}, flow=CARRY, observe={"samples_per_step": 100}, **LONG)
    measured = lines(folder)
    assert len(measured) == 6
    assert any(line["carried_groups"] for line in measured) and measured[-1]["carried_groups"] == 0
    assert any(line["sample_versions"] > 1 for line in measured), "no sample crossed a version"
    assert 0 < max(line["staleness_max"] for line in measured) <= 2
    assert all(line["learned_samples"] == 16 for line in measured)
    ids = [sample["id"] for sample in samples(folder)]
    assert len(ids) == len(set(ids)) == 6 * 16


def test_the_same_run_twice_is_the_same_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uneven(monkeypatch)
    over: dict[str, Any] = {"train": {"steps": 3, "updates_per_step": 1}, "flow": CARRY, **LONG}
    assert lines(run(tmp_path / "a", **over)) == lines(run(tmp_path / "b", **over))


def test_dropped_groups_are_replaced_by_carried_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uneven(monkeypatch)
    algorithm = {"name": "dapo", "dynamic_sampling": True, "dynamic_sampling_rounds": 3}
    folder = run(tmp_path, train={"steps": 4, "updates_per_step": 1}, flow=CARRY, algorithm=algorithm, **LONG)
    measured = lines(folder)
    assert len(measured) == 4 and any(line.get("dropped_groups") for line in measured)
    assert all(np.isfinite(line["loss"]) and line["staleness_max"] <= 2 for line in measured)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "ppo"},
        {"name": "grpo", "old_logprobs": "recompute", "rollout_correction": "token", "kl": {"coef": 0.1}},
    ],
    ids=lambda a: a["name"],
)
def test_scores_are_of_the_steps_own_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any]
) -> None:
    """A group that finished too late for its step is scored under the weights of the step that takes it."""
    uneven(monkeypatch)
    over = {"train": {"steps": 4, "updates_per_step": 1}, "flow": CARRY, "algorithm": algorithm, **LONG}
    for line in lines(run(tmp_path, **over)):
        if algorithm.get("old_logprobs") == "recompute":
            assert line["ratio_max"] == pytest.approx(1, abs=1e-3) and line["ratio_min"] == pytest.approx(1, abs=1e-3)
        assert np.isfinite(line["loss"])


def test_memory_is_handed_over_with_a_tail_in_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uneven(monkeypatch)
    over: dict[str, Any] = {"train": {"steps": 4, "updates_per_step": 1}, **LONG}
    never = lines(run(tmp_path / "never", flow={**CARRY, "hand_over": "never"}, **over))
    handed = lines(run(tmp_path / "all", flow={**CARRY, "hand_over": "all"}, **over))
    for a, b in zip(never, handed, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4, abs=1e-6)
        assert b["made_tokens"] == a["made_tokens"]


def noted_run(folder: Path, recipe: dict[str, Any]) -> None:
    write_down(folder)
    uneven()
    slow_down(seconds=0.01)
    launch.train(recipe)


def noted_again(folder: Path) -> None:
    uneven()
    noted_resume(folder)


@pytest.mark.parametrize("moment", range(3))
def test_killed_and_resumed_every_sample_is_learned_from_exactly_once(tmp_path: Path, moment: int) -> None:
    recipe = {**RECIPE, **LONG, "flow": CARRY, "eval": {"size": 0, "before": False}, "folder": str(tmp_path)}
    child = FORK.Process(target=noted_run, args=(tmp_path, recipe))
    child.start()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not any((tmp_path / "small" / "checkpoints").glob("step-00000[1-9]")):
        time.sleep(0.01)
    time.sleep(0.1 * moment)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert in_child(lambda: noted_again(tmp_path)) == 0
    steps = learned(tmp_path)
    assert sorted(steps) == list(range(1, RECIPE["train"]["steps"] + 1))
    ids = [i for step in steps.values() for i in step]
    assert sorted(ids) == list(range(16 * len(steps)))  # every prompt that was fed, once


@pytest.mark.parametrize(
    ("flow", "words"),
    [
        ({"schedule": "streamed", "carry_over": 0.5}, "no tail to carry over"),
        ({"carry_over": 2.0, "max_staleness": 1}, "learned from in time"),
    ],
)
def test_settings_that_cannot_work_are_refused(flow: dict[str, Any], words: str) -> None:
    from tidemill.check.rules import problems

    assert any(words in problem for problem in problems(load({**RECIPE, "flow": flow}, []).config))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rollout-0", "ledger"])
def test_a_killed_worker_loses_and_doubles_nothing(tmp_path: Path, victim: str) -> None:
    pytest.importorskip("msgspec")
    from tests.cluster.runs import Disturb, ledger, measured, train, worker

    watch = Disturb(ledger if victim == "ledger" else worker(victim))
    over: dict[str, Any] = {"rollout": {"max_new_tokens": 40, "concurrent": 12}, "data": LONG["data"]}
    steps = {"steps": 6, "updates_per_step": 1}
    every = {"samples_per_step": 100}
    train(tmp_path, watch, flow=CARRY, train=steps, cluster={"rollouts": 2}, observe=every, **over)
    assert watch.killed
    told = {line["step"]: line for line in measured(tmp_path) if "loss" in line}
    assert all(line["learned_samples"] == 16 and line["staleness_max"] <= 2 for line in told.values())
    assert sorted(told) == list(range(1, 7)) and max(line["staleness_max"] for line in told.values()) > 0
    ids = [sample["id"] for sample in samples(tmp_path / "small")]
    assert sorted(ids) == list(range(6 * 16))
