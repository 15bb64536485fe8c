"""TRL's GRPO step on one accelerator: with vLLM in its process, and with our engine as its `rollout_func`.

    PYTHONPATH=SITE:src python benchmarks/gpu_bridges.py                        # about six minutes on an H200
    PYTHONPATH=SITE:src python benchmarks/gpu_bridges.py --shapes 1.5b --arms vllm,rollout

32 prompts × 8 samples of 256 + 512 tokens; random weights, so no response ends early. The trainer, its loss and its
settings are the same in all arms; `packed` takes our packed log-probs too. Each arm is a process of its own, and its
figures are printed as it ends, so that a run cut short has told what it knows.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
from benchmarks._step_trl import OURS
from benchmarks.gpu_step import OFFLINE, Power, child, figures

ABOUT = "TRL's GRPO step on one accelerator: with vLLM, and with our engine in it"
OPTIONS: dict[str, Any] = {
    "shapes": "smollm2-135m,1.5b",
    "arms": "vllm,rollout,packed",
    "steps": 1,  # timed
    "warmup": 1,  # steps before them: kernels are compiled and graphs captured there
    "prompts": 32,
    "samples": 8,
    "prompt": 256,
    "response": 512,
    "trl_batch": 32,
    "limit_s": 240.0,  # of one arm
}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for key, default in OPTIONS.items():
        words.add_argument(f"--{key.replace('_', '-')}", default=default, type=type(default))
    asked = vars(words.parse_args())
    power = Power()
    found: dict[str, Any] = {}
    try:
        for shape in asked["shapes"].split(","):
            found[shape] = shaped(shape, asked, power)
    finally:
        power.close()
    failed = [f"{shape} {arm}" for shape, arms in found.items() for arm, told in arms.items() if "error" in told]
    print(json.dumps({"bench": "gpu_bridges", "failed": failed, "cases": found}))
    sys.exit(bool(failed))


def shaped(shape: str, asked: dict[str, Any], power: Power) -> dict[str, Any]:
    """Measure all arms with one model."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        job = {**asked, "shape": shape, "steps": asked["steps"] + asked["warmup"], "model": f"{folder}/model"}
        job["prompts_file"] = f"{folder}/prompts.jsonl"
        child("_step_trl.py", {**job, "do": "make"}, OFFLINE)
        for arm in asked["arms"].split(","):
            its = {**job, "do": "train", "arm": arm, "takes_ours": arm in OURS}
            found[arm] = figures(child("_step_trl.py", its, OFFLINE), asked, power)
            show(shape, arm, found)
    return found


def show(shape: str, arm: str, found: dict[str, Any]) -> None:
    told = found[arm]
    if "error" in told:
        print(f"{shape:14s} {arm:9s} FAILED: {told['error']}", flush=True)
        return
    first = next(iter(found.values()))
    told["ratio"] = first["step_s"] / told["step_s"] if "step_s" in first else None
    parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in told["parts_s"].items())
    times = f"{told['ratio']:.2f} × the first arm" if told["ratio"] else "the first arm failed"
    print(
        f"{shape:14s} {arm:9s} step {told['step_s']:.2f} s ({parts}), first {told['first_step_s']:.1f} s, "
        f"{told['tokens_per_s']:,.0f} tokens/s, peak {told['peak_gib']:.1f} GiB, {times}",
        flush=True,
    )


if __name__ == "__main__":
    main()
