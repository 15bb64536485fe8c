"""Run folders written for the tests: as a run writes them, of any length, without training anything."""

from __future__ import annotations

import json
import math
from pathlib import Path

SAMPLES = 4  # of a step, two groups of two


def metrics(step: int, lr: float = 1e-5) -> dict[str, float]:
    return {
        "step": step,
        "reward": round(1 - math.exp(-step / 40), 4),
        "reward/exact": round(1 - math.exp(-step / 40), 4),
        "accuracy": round(1 - math.exp(-step / 30), 4),
        "response_tokens": 16.0,
        "entropy": 2.0,
        "old_kl": 1e-5,
        "clip_share_low": 0.0,
        "grad_norm": 0.5,
        "equal_reward_groups": 0.1,
        "mismatch/native/mean": 1e-6,
        "lr": lr,
        "version": step,
        "tokens_per_s": 1000.0,
        "time/rollout": 0.6,
        "time/learn": 0.3,
        "time/step": 1.0,
        "idle/rollout": 0.4,
        "machine/host_memory_peak": 1e9,
    }


def samples(step: int) -> list[dict[str, object]]:
    return [
        {
            "step": step,
            "id": step * SAMPLES + i,
            "group": step * 2 + i // 2,
            "prompt": f"{step}+{i // 2}=",
            "response": f'answer {step + i} of "step {step}"',
            "answer": str(step + i // 2),
            "reward": round((step * 7 + i * 3) % 11 / 10, 2),
            "rewards": {"exact": 1.0},
            "correct": i % 2 == 0,
            "finish": "stop",
            "versions": [step - 1],
            "tokens": [1, 2, 3],
            "logprobs": [-0.1, -1.0, -3.0],
        }
        for i in range(SAMPLES)
    ]


def append(run: Path, first: int, last: int, lr: float = 1e-5) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(metrics(step, lr)) + "\n" for step in range(first, last + 1))
    with (run / "samples.jsonl").open("a") as file:
        file.writelines(json.dumps(s) + "\n" for step in range(first, last + 1) for s in samples(step))


def run(root: Path, name: str = "one", steps: int = 50, *, lr: float = 1e-5, is_over: bool = True) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    config = f"name: {name}\nabout: sums\ntrain: {{steps: {steps}}}\nalgorithm: {{name: grpo}}\nlearn: {{lr: {lr}}}\n"
    (folder / "config.yaml").write_text(config)
    append(folder, 1, steps, lr)
    if is_over:
        (folder / "summary.json").write_text(json.dumps({"steps": steps, "is_stopped": False}))
    checkpoint = folder / "checkpoints" / f"step-{steps:06d}"
    checkpoint.mkdir(parents=True)
    about = {"step": steps, "best": True, "metric": 0.5, "files": {"a": {"bytes": 1000}}}
    (checkpoint / "manifest.json").write_text(json.dumps(about))
    return folder
