"""A run on an NPU computes the CPU's numbers, and its learner waits for the device at most twice a micro-batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.same import BASE, CASES

import tidemill
from tests.learn.grouped import grouped
from tests.rollout.tiny import tiny_model
from tidemill.algorithms.shared.registry import get
from tidemill.learn.engine import Learner
from tidemill.models.mixture import experts
from tidemill.recipe.config import Config
from tidemill.run.start import resume

METRICS = ("loss", "grad_norm", "reward", "kl", "entropy")
RUNS = {
    "quickstart": (),
    "lora": CASES["lora"],
    "mixture": CASES["mixture"],
    "mixture with its routes replayed": CASES["mixture_replay"],
    "hand-over": ("flow.hand_over=all", "algorithm.kl.coef=0.05"),
    "two updates, float32 beside 16 bits": ("learn.master=float32", "learn.moments=int8"),
}


def run(folder: Path, device: str, over: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    tidemill.train({**BASE, "folder": str(folder), "name": device, "device": device}, list(over))
    return lines(folder / device)


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def same(found: list[dict[str, Any]], wanted: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted):
        for name in METRICS:
            if name in b:
                assert a[name] == pytest.approx(b[name], abs=tolerance), name


@pytest.mark.parametrize("what", RUNS)
def test_a_run_computes_the_cpus_numbers(what: str, npu: torch.device, counts: Any, tmp_path: Path) -> None:
    wanted = run(tmp_path, "cpu", RUNS[what])
    counts.reset()
    found = run(tmp_path, "npu", RUNS[what])
    same(found, wanted)
    if not counts.is_real:
        assert (counts.refusals == [] and counts.replays > 0) or what == "lora"  # adapters are decoded in step
    if what == "hand-over":
        assert all(line["handed_over/state_bytes"] > 0 for line in found[1:])


def test_a_run_that_stopped_goes_on_to_the_same_numbers(npu: torch.device, counts: Any, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", "npu", ("checkpoint.every=1",))
    stopped = tmp_path / "stopped"
    run(stopped, "npu", ("checkpoint.every=1", "train.steps=2"))
    config = stopped / "npu" / "config.yaml"
    config.write_text(config.read_text().replace("steps: 2", "steps: 3", 1))
    (stopped / "npu" / "summary.json").unlink()
    resume(stopped / "npu")
    same(lines(stopped / "npu")[-1:], whole[-1:])


def a_learner(name: str, device: torch.device) -> Learner:
    settings = Config(train={"tokens_per_microbatch": 60}, algorithm={"name": "grpo"})  # type: ignore[arg-type]
    model = tiny_model(name).to(device)
    experts.plug(model)
    return Learner(model, settings, get("grpo"), 2)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_the_learner_waits_at_most_twice_a_micro_batch(name: str, npu: torch.device, counts: Any) -> None:
    made, batch = a_learner(name, npu), grouped(np.random.default_rng(0), 6, 4)
    made.accumulate(batch)
    made.update()  # the first makes the optimizer's state
    counts.reset()
    made.accumulate(batch)
    parts = sum(len(rows) > 0 for rows in made._dealt(batch))
    made.update()
    assert parts > 2 and counts.syncs <= 2 * parts and counts.refusals == []
