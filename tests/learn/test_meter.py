"""The mismatch meter inside a run: it reads what the engine made with the weights that score it, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tidemill
from tidemill.algorithms.api import TokenBatch, total
from tidemill.batch import Batch, Column
from tidemill.learn.rows.tokens import mismatch


def token_batch(now: list[float], rollout: list[float], mask: list[float]) -> TokenBatch:
    tensor = torch.tensor
    zero = torch.zeros(len(now))
    return TokenBatch(
        logprobs=tensor(now), old_logprobs=zero, advantages=zero, weights=zero, mask=tensor(mask),
        row=torch.zeros(len(now), dtype=torch.int64), rows=1, rollout_logprobs=tensor(rollout),
    )  # fmt: skip


def test_tokens_of_other_weights_and_of_the_environment_do_not_count() -> None:
    part = Batch({"id": np.array([0]), "versions": Column.jagged([[3, 3, 2, 3]], np.int32)})
    tokens = token_batch([-1.0, -1.5, -9.0, -9.0], [-1.0, -2.0, -1.0, -1.0], [1.0, 1.0, 1.0, 0.0])
    found = total([mismatch(part, tokens, 3, "native")])
    assert found["mismatch/native/mean"] == pytest.approx(0.25) and found["mismatch/native/max"] == pytest.approx(0.5)
    assert found["mismatch/native/ratio_mean"] == pytest.approx((1 + np.exp(0.5)) / 2)
    assert mismatch(part, tokens, 4, "native") == {}


def run(folder: Path, steps: int = 3, **rollout: Any) -> list[dict[str, float]]:
    recipe = {
        "folder": str(folder), "name": "run", "threads": 1,
        "model": {"tiny": {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 64, "window": 40,
                           "alphabet": "0123456789+-= "}},
        "data": {"source": "chain", "args": {"terms": 2, "max_value": 4}, "max_prompt_tokens": 12},
        "rollout": {"max_new_tokens": 8, **rollout},
        "rewards": "last_number",
        "train": {"steps": steps, "prompts_per_step": 8, "samples_per_prompt": 8, "tokens_per_microbatch": 400},
        "learn": {"lr": 1e-2},
        "eval": {"size": 4, "before": False, "after": False},
        "observe": {"tensorboard": False},
    }  # fmt: skip
    tidemill.train(recipe)
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "truncation", [{}, {"top_p": 0.6}, {"top_k": 3, "temperature": 0.7}, {"min_p": 0.9, "temperature": 1.3}]
)
@pytest.mark.parametrize("engine", ["native", "hf"])
def test_every_run_logs_the_gap_and_with_truncation_the_ratio_still_compares_like_with_like(
    tmp_path: Path, engine: str, truncation: dict[str, float]
) -> None:
    for metrics in run(tmp_path, engine=engine, **truncation):
        assert metrics[f"mismatch/{engine}/max"] < 1e-4
        assert metrics[f"mismatch/{engine}/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)  # and so does the loss's own
        assert metrics.get("kept_mass", 1.0) < 0.9 if truncation else "kept_mass" not in metrics
