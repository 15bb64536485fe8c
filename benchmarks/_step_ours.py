"""Tidemill's half of `gpu_step`: the same job as a run of its own. The last line of output is one JSON object."""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
import time
from typing import Any

GIB = 2**30


def noise(sample: Any) -> float:
    """A reward of its own for every sample, as the peer has: groups of equal rewards would cost us no backward pass."""
    return random.Random(sample.id).random()


class Enough(Exception):
    """All steps are timed; what a run does at its end is not the step's."""


def recipe(job: dict[str, Any], folder: str, dtype: str) -> dict[str, Any]:
    return {
        "name": "step",
        "folder": folder,
        "model": {"path": job["model"], "dtype": dtype},
        "data": {"source": job["prompts_file"], "held_out": 0, "max_prompt_tokens": job["prompt"], "chat": "off"},
        "train": {
            "steps": job["steps"],
            "prompts_per_step": job["prompts"],
            "samples_per_prompt": job["samples"],
            "tokens_per_microbatch": job["microbatch"],
        },
        "rollout": {"max_new_tokens": job["response"], "concurrent": job["prompts"] * job["samples"]},
        "rewards": [{"function": "noise"}],
        "algorithm": "grpo",
        "learn": {"lr": 1e-6, "recompute": job["recompute"], "logprob_chunk": job["logprob_chunk"]},
        "flow": {"schedule": job["schedule"]},
        "eval": {"before": False, "after": False, "size": 0},
        "checkpoint": {"every": 0},
        "observe": {"tensorboard": False, "samples_per_step": 0, "progress": "off"},
    }


def train(job: dict[str, Any]) -> dict[str, Any]:
    import torch

    from tidemill.device import mapped
    from tidemill.reward.registry import BUILT_IN, BuiltIn
    from tidemill.run import start as launch
    from tidemill.run.loop import Watcher

    BUILT_IN["noise"] = BuiltIn("benchmarks._step_ours:noise", True)
    on_device = torch.accelerator.is_available()
    laps: list[dict[str, float]] = []

    class Clock(Watcher):
        def started(self, workers: Any, first_step: int) -> None:
            self.start = time.time()

        def stepped(self, step: int, metrics: dict[str, float]) -> None:
            if on_device:
                torch.accelerator.synchronize()
            end = time.time()
            lap = {"start": self.start, "end": end, "tokens": metrics["prompt_tokens"] + metrics["made_tokens"]}
            assert metrics["equal_reward_groups"] == 0
            laps.append({**lap, **{f"{n.removeprefix('time/')}_s": v for n, v in metrics.items() if "time/" in n}})
            self.start = end
            print(f"Tidemill step {step}: {laps[-1]}", flush=True)
            if step == job["steps"]:
                raise Enough

        def noted(self, message: str) -> None:
            print(f"note: {message}", flush=True)

    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Enough):
        launch.train(recipe(job, folder, "bfloat16" if on_device else "float32"), watch=Clock())
    # The two need not have been at the same time: at most this.
    peak = torch.accelerator.max_memory_allocated() + mapped.most_bytes() if on_device else 0
    return {"laps": laps, "peak_gib": peak / GIB}


if __name__ == "__main__":
    print(json.dumps(train(json.loads(sys.argv[1]))))
