"""A run so small that a test can afford to start it on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

STEPS = 8
RECIPE: dict[str, Any] = {
    "name": "small",
    "device": "cpu",
    "threads": 1,
    "model": {"tiny": {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 48, "window": 64}},
    "data": {"source": "chain", "args": {"terms": 3, "max_total": 9}, "max_prompt_tokens": 16},
    "rollout": {"max_new_tokens": 8},
    "rewards": "last_number",
    "train": {"steps": STEPS, "prompts_per_step": 4, "samples_per_prompt": 4},
    "learn": {"lr": 1e-2},
    "eval": {"size": 0, "before": False, "after": False},
    "checkpoint": {"every": 1},
    "observe": {"tensorboard": False},
}


def write(folder: Path, **more: Any) -> Path:
    file = folder / "small.yaml"
    file.write_text(yaml.safe_dump({**RECIPE, "folder": str(folder / "runs"), **more}))
    return file
