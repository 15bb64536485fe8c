"""Rollout ahead of learning: bounded in age, the same as `sync` with no lead, every sample used once whatever dies."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.faults.test_resume import FORK, RECIPE, KillAfter, in_child, numbers, resume_until_done
from tests.flow.test_schedules import run

from tidemill.errors import TidemillError
from tidemill.flow.stages.learning import LearnWorker
from tidemill.flow.stages.rolling import RolloutWorker
from tidemill.run import start as launch

LONG = {"rollout": {"max_new_tokens": 40}, "data": {"max_prompt_tokens": 16}}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [line for line in numbers(folder) if "loss" in line]


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("updates", [1, 2])
def test_async_without_staleness_makes_the_samples_of_sync(tmp_path: Path, updates: int) -> None:
    small = {"steps": 3, "updates_per_step": updates}
    every = {"samples_per_step": 100}
    sync = run(tmp_path / "sync", train=small, observe=every)
    ahead = run(tmp_path / "async", train=small, observe=every, flow={"schedule": "async", "max_staleness": 0})
    assert samples(sync) == samples(ahead)
    for a, b in zip(lines(sync), lines(ahead), strict=True):
        assert {k: b[k] for k in a if k in b} == pytest.approx({k: a[k] for k in a if k in b}, rel=1e-4, abs=1e-5)
        assert b["staleness_max"] == 0


def test_separated_streamed_computes_the_steps_of_sync(tmp_path: Path) -> None:
    small = {"steps": 3, "tokens_per_microbatch": 24}
    sync = run(tmp_path / "sync", train=small)
    apart = run(tmp_path / "apart", train=small, flow={"schedule": "streamed", "placement": "separated"})
    for a, b in zip(numbers(sync), numbers(apart), strict=True):
        assert b == pytest.approx(a, rel=1e-4, abs=1e-5)


def slow_down(set_attribute: Callable[..., None] = setattr, seconds: float = 0.01) -> None:
    """Decode so slowly that learning always overtakes it."""
    step = RolloutWorker.poll

    def poll(worker: RolloutWorker) -> bool:
        if worker.engine.has_work:
            time.sleep(seconds)
        return step(worker)

    set_attribute(RolloutWorker, "poll", poll)


def test_samples_run_across_versions_and_never_get_older_than_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch.setattr)
    over = {"train": {"steps": 8, "updates_per_step": 2}, "flow": {"schedule": "async", "max_staleness": 2}, **LONG}
    measured = lines(run(tmp_path, **over))
    assert len(measured) == 8
    assert max(line["staleness_max"] for line in measured) in (1.0, 1.5, 2.0)
    assert any(line["sample_versions"] > 1 for line in measured), "no sample crossed a version"
    assert all(line["stale_samples"] == line["expired_leases"] == 0 for line in measured)
    assert sum(line.get("resumed_samples", 0) for line in measured) > 0


def test_half_made_samples_may_go_on_with_the_keys_they_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch.setattr)
    flow = {"schedule": "async", "max_staleness": 1, "unfinished_samples": "keep_kv"}
    measured = lines(run(tmp_path, train={"steps": 5, "updates_per_step": 1}, flow=flow, **LONG))
    assert len(measured) == 5 and max(line["staleness_max"] for line in measured) == 1


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "ppo"},
        {"name": "dapo"},
        {"name": "grpo", "old_logprobs": "recompute", "rollout_correction": "token", "kl": {"coef": 0.1}},
        {"name": "reinforce_pp"},
    ],
    ids=lambda a: a["name"],
)
def test_algorithms_that_look_at_whole_steps_run_ahead_too(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    over = {"train": {"steps": 4, "updates_per_step": 1}, "flow": {"schedule": "async", "max_staleness": 2}}
    measured = lines(run(tmp_path, algorithm=algorithm, **over))
    assert len(measured) == 4 and all(np.isfinite(line["loss"]) for line in measured)


@pytest.mark.parametrize("dora", [False, True])
def test_low_rank_adapters_are_merged_on_the_way_to_rollout(tmp_path: Path, dora: bool) -> None:
    """The ratio of the first update is 1 only if rollout served exactly what the learner computes with."""
    over = {"train": {"steps": 3, "updates_per_step": 1}, "flow": {"schedule": "async", "max_staleness": 0}}
    for line in lines(
        run(tmp_path, learn={"lora_rank": 2, "lr": 1e-2, "dora": dora}, reshard={"verify": "all"}, **over)
    ):
        assert line["ratio_max"] == pytest.approx(1, abs=1e-3) and line["ratio_min"] == pytest.approx(1, abs=1e-3)


def test_an_error_in_the_rollout_thread_ends_the_run_with_its_own_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(worker: RolloutWorker, completion: Any) -> None:
        raise TidemillError("the engine broke")

    monkeypatch.setattr(RolloutWorker, "_finish", broken)
    with pytest.raises(TidemillError, match="the engine broke"):
        run(tmp_path, flow={"schedule": "async"})
    assert not [t for t in threading.enumerate() if t.name == "work-rollout-0"]


ASYNC = {**RECIPE, "flow": {"schedule": "async", "max_staleness": 2}, "eval": {"size": 0, "before": False}}


def write_down(folder: Path) -> None:
    """Each step's learned ids, one line each, as the learner ends it."""
    finish = LearnWorker._finish_step

    def noted(worker: LearnWorker) -> None:
        ids = sorted(int(i) for held in worker.held for i in held.batch.values("id"))
        finish(worker)
        step = worker.learner.version // worker.config.train.updates_per_step
        with (folder / "learned.jsonl").open("a") as out:
            out.write(json.dumps([step, ids]) + "\n")

    LearnWorker._finish_step = noted  # type: ignore[method-assign]


def learned(folder: Path) -> dict[int, list[int]]:
    """What the last attempt at each step learned from: a step after the last checkpoint is made again."""
    return dict(json.loads(line) for line in (folder / "learned.jsonl").read_text().splitlines())


def noted_run(folder: Path, recipe: dict[str, Any]) -> None:
    write_down(folder)
    slow_down(seconds=0.03)
    launch.train(recipe)


def noted_resume(folder: Path) -> None:
    write_down(folder)
    resume_until_done(folder / "small")


@pytest.mark.parametrize("moment", range(4))
def test_killed_and_resumed_every_sample_is_learned_from_exactly_once(tmp_path: Path, moment: int) -> None:
    recipe = {**ASYNC, "folder": str(tmp_path)}
    child = FORK.Process(target=noted_run, args=(tmp_path, recipe))
    child.start()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not any((tmp_path / "small" / "checkpoints").glob("step-00000[1-9]")):
        time.sleep(0.01)
    time.sleep(0.05 * moment)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert in_child(lambda: noted_resume(tmp_path)) == 0
    steps = learned(tmp_path)
    assert sorted(steps) == list(range(1, RECIPE["train"]["steps"] + 1))
    ids = [i for step in steps.values() for i in step]
    per_step = RECIPE["train"]["prompts_per_step"] * RECIPE["train"]["samples_per_prompt"]
    assert len(ids) == len(set(ids)) == per_step * len(steps)
    assert len(lines(tmp_path / "small")) == len(steps)


def test_interrupted_by_the_user_samples_under_way_are_kept(tmp_path: Path) -> None:
    summary = launch.train({**ASYNC, "folder": str(tmp_path)}, watch=KillAfter(2, signal.SIGINT))
    assert summary.is_stopped and summary.steps == 2
    after = launch.resume(tmp_path / "small")
    assert after.steps == RECIPE["train"]["steps"] and not after.is_stopped


def test_a_failed_transfer_leaves_the_old_version_serving() -> None:
    from tests.cluster.ports import Copy
    from tests.rollout.tiny import tiny_model

    from tidemill.reshard.wires.one_process import OneProcessWire

    learner, served = tiny_model("qwen2"), tiny_model("qwen2")
    served.load_state_dict(learner.state_dict())

    class Engine:
        version = 0
        has_work = False

        def pause(self) -> list[Any]:
            return []

        def resume(self, partials: Any) -> None: ...

        def load(self, weights: Any, version: int) -> None:
            self.version = version

    engine = Engine()
    copy = Copy(learner, served, engine)
    before = {n: p.clone() for n, p in served.named_parameters()}
    with torch.no_grad():
        for p in learner.parameters():
            p.add_(1.0)

    def flip(tensor: torch.Tensor) -> None:
        tensor.view(-1)[0] += 1.0

    copy.wire.wire = OneProcessWire(tamper=flip)
    with pytest.raises(TidemillError, match="do not match their checksums"):
        copy.publish(1)
    assert engine.version == 0 and all(torch.equal(p, before[n]) for n, p in served.named_parameters())
    copy.wire.wire = OneProcessWire()
    copy.publish(2)
    assert all(torch.equal(p, before[n]) for n, p in served.named_parameters()), "the old version goes on serving"
    copy.take_up(2)
    own = dict(learner.named_parameters())
    assert engine.version == 2 and all(torch.equal(p, own[n]) for n, p in served.named_parameters())
