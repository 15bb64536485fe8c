"""Checkpoints written before there was one learner (commit 13d88df) are taken up by it: the next step is the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import tidemill
from tidemill.learn import checkpoint
from tidemill.run.start import resume

DATA = Path(__file__).parent / "data" / "checkpoints"
RECIPE: dict[str, Any] = {
    "model": {"tiny": {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 32, "window": 32,
                       "alphabet": "01234567="}},
    "data": {"source": "reversal", "max_prompt_tokens": 8},
    "rollout": {"max_new_tokens": 8},
    "rewards": [{"function": "length", "args": {"target": 4, "unit": "characters"}}],
    "train": {"steps": 1, "prompts_per_step": 4, "samples_per_prompt": 4},
    "learn": {"lr": 1.0e-3},
    "eval": {"size": 0},
    "checkpoint": {"every": 1, "keep": 3},
    "observe": {"tensorboard": False, "progress": "off"},
    "device": "cpu",
    "threads": 1,
}  # fmt: skip
# What each was written with: by one process, moments in eight bits or a critic and a moved reference in it; by two
# ranks, in pieces. All are taken up by one process.
WRITTEN = {
    "critic": ["algorithm.name=ppo", "algorithm.kl={coef: 0.05, reset_every: 1}"],
    "adapters": ["learn.lora_rank=2", "learn.ema=0.5", "learn.moments=int8", "algorithm.kl.coef=0.05"],
    "ranks": [],
}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_step_after_an_older_checkpoint_is_the_one_that_followed_it(tmp_path: Path, name: str) -> None:
    assert ("tensors" in json.loads((DATA / name / "step-000001/manifest.json").read_text())) == (name == "ranks")
    tidemill.train({**RECIPE, "folder": str(tmp_path), "name": name}, WRITTEN[name])
    run = tmp_path / name
    shutil.rmtree(run / "checkpoints" / "step-000001")
    shutil.copytree(DATA / name / "step-000001", run / "checkpoints" / "step-000001")
    assert checkpoint.fault(run / "checkpoints" / "step-000001") is None
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("steps: 1", "steps: 2", 1))
    (run / "summary.json").unlink()
    resume(run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    wanted = json.loads((DATA / "second_step.json").read_text())[name]
    assert {k: lines[-1][k] for k in wanted} == pytest.approx(wanted, abs=1e-5)
