"""A whole training run whose tokens vLLM makes. `make test-vllm` runs it; where vLLM is missing it is skipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

STEPS = 3
RECIPE: dict[str, Any] = {
    "name": "small",
    "device": "cpu",
    "threads": 1,
    # Heads of 32: vLLM's attention on a CPU takes none smaller.
    "model": {"tiny": {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 128, "window": 64}},
    "data": {"source": "chain", "args": {"terms": 3, "max_total": 9}, "max_prompt_tokens": 16},
    "rollout": {"engine": "vllm", "max_new_tokens": 8, "concurrent": 16, "top_p": 0.9, "vllm": {"sleep_level": 2}},
    "rewards": "last_number",
    "train": {"steps": STEPS, "prompts_per_step": 4, "samples_per_prompt": 4},
    "learn": {"lr": 1e-2},
    "eval": {"size": 8, "every": 2},
    "observe": {"tensorboard": False},
}


def run(tmp_path: Path, recipe: dict[str, Any]) -> list[dict[str, float]]:
    """The lines of a run's metrics, of steps that learned. In a process of its own, as a user starts it."""
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump({**recipe, "folder": str(tmp_path)}))
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from tidemill.cli import main; main()", "train", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "small" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


@pytest.mark.slow
def test_a_run_learns_from_what_vllm_makes_with_every_update_served(tmp_path: Path) -> None:
    """The learning rate is large: a rollout under weights of the step before would be far from the learner."""
    learned = run(tmp_path, RECIPE)
    assert [line["version"] for line in learned] == list(range(1, STEPS + 1))
    for line in learned:
        assert line["mismatch/vllm/mean"] < 1e-3 and line["mismatch/vllm/max"] < 1e-2
        assert 0.85 < line["kept_mass"] < 1


# Of every adapted matrix (out, in) of a layer, by RECIPE's sizes: out + in.
SIDES = (128 + 128) + 2 * (64 + 128) + (128 + 128) + 3 * (128 + 128)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 1, 2], ids=["beside", "apart", "apart from a learner that is cut"])
def test_of_adapters_every_update_is_served_and_nothing_else_moves(tmp_path: Path, ranks: int) -> None:
    """Also into samples under way, where rollout has a worker of its own and goes on while the learner works."""
    flow = {"schedule": "async", "max_staleness": 1} if ranks else {}
    cluster = {"executor": "processes", "learners": ranks, "placement": {"rollout": "separated"}} if ranks else {}
    learn = {"lr": 5e-2, "lora_rank": 8, "parallel": {"fsdp": max(1, ranks)}}
    learned = run(tmp_path, {**RECIPE, "learn": learn, "cluster": cluster, "flow": flow})
    assert [line["version"] for line in learned] == list(range(1, STEPS + 1))
    for line in learned[1:]:
        assert line["machine/weight_bytes"] == 2 * 8 * SIDES * 4
        if not ranks:
            assert line["mismatch/vllm/mean"] < 1e-3 and line["mismatch/vllm/max"] < 1e-2
