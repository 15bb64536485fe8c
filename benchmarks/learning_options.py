"""What the learner's savings do to learning: the quickstart with each of them, beside the plain path, on several seeds.

    tidemill bench learning-options --json                              # about 50 minutes on 2 cores
    tidemill bench learning-options --seeds 0 --variants plain,shared   # two runs
    PYTHONPATH=SITE:src python benchmarks/learning_options.py           # the same on an accelerator: about 6 minutes

A seed's runs start from one warm start. `equal_bits`: the run's last weights are the plain run's, bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src")]

ABOUT = "the quickstart with shared prompts, LoRA, recompute, offload, 8-bit Adam, 8-bit products: accuracy after"
# The plain path: nothing shared, nothing saved.
VARIANTS: dict[str, list[str]] = {
    "plain": [],
    "shared": ["learn.share_prompts=true"],
    "lora": ["learn.lora_rank=16", "learn.lora_alpha=32", "learn.lr=7e-4"],
    "recompute": ["learn.recompute=full"],
    "recompute_mlp": ["learn.recompute=mlp"],
    "offload": ["learn.offload=activations"],
    "int8_adam": ["learn.moments=int8"],
    "fp8": ["learn.fp8=rowwise"],
}
OPTIONS: dict[str, Any] = {
    "seeds": [0, 1, 2, 3, 4],
    "variants": list(VARIANTS),
    "steps": 80,
    "size": 200,  # held-out problems
    "device": "auto",
    "threads": 1,
    "limit_s": 0.0,  # no new run starts after this; 0: no limit
}


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()
    found: dict[str, dict[str, Any]] = {name: {} for name in options["variants"]}
    for seed in options["seeds"]:
        folder = Path(tempfile.mkdtemp())
        try:
            model, plain = warm_start(int(seed), folder, options), None
            for name in options["variants"]:
                if options["limit_s"] and time.perf_counter() - started > options["limit_s"]:
                    break
                figures, weights = learn(name, int(seed), model, folder, options)
                plain = weights if name == "plain" else plain
                if plain is not None and name != "plain":
                    figures["equal_bits"] = is_equal(plain, weights)
                found[name][str(seed)] = figures
                print(name, seed, figures, file=sys.stderr, flush=True)
        finally:
            shutil.rmtree(folder)
    return {"variants": {name: verdict(name, found) for name, seeds in found.items() if seeds}, "runs": found}


def verdict(name: str, found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Mean accuracy, and in points how far from the plain path on the same seeds."""
    seeds = found[name]
    result: dict[str, Any] = {"accuracy_after": mean(s["accuracy_after"] for s in seeds.values()), "seeds": len(seeds)}
    both = [seed for seed in seeds if seed in found.get("plain", {})]
    if both:
        gaps = [seeds[s]["accuracy_after"] - found["plain"][s]["accuracy_after"] for s in both]
        result |= {"points_from_plain": 100 * mean(gaps), "equal_bits": [seeds[s].get("equal_bits") for s in both]}
    return result


def common(seed: int, folder: Path, options: Mapping[str, Any]) -> list[str]:
    return [
        f"seed={seed}", f"folder={folder}", f"device={options['device']}", f"threads={options['threads']}",
        "learn.compile=off", "observe.tensorboard=false", "observe.progress=off", "checkpoint.every=0",
    ]  # fmt: skip


def warm_start(seed: int, folder: Path, options: Mapping[str, Any]) -> Path:
    from tidemill.run import start as launch
    from tidemill.run.trained import export

    words = ["name=warm", "eval.before=false", "eval.after=false", *common(seed, folder, options)]
    with contextlib.redirect_stdout(sys.stderr):
        launch.train("quickstart-sft", words)
    export(folder / "warm", folder / "model")
    return folder / "model"


def learn(name: str, seed: int, model: Path, folder: Path, options: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    from tidemill.learn import checkpoint
    from tidemill.run import start as launch

    words = [
        f"name={name}", f"model.path={model}", f"train.steps={options['steps']}", f"eval.size={options['size']}",
        "eval.every=0", "eval.before=false", "learn.share_prompts=false",
    ]  # fmt: skip
    began = time.perf_counter()
    summary = launch.train("quickstart", [*words, *common(seed, folder, options), *VARIANTS[name]])
    newest = checkpoint.latest(folder / name / "checkpoints")
    assert newest is not None
    tensors, _ = checkpoint.load(newest.path)
    weights = {n: t for n, t in tensors.items() if n.startswith("model.")}
    return {"accuracy_after": summary.accuracy_after, "seconds": time.perf_counter() - began}, weights


def is_equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[n].equal(b[n]) for n in a)


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    for key, default in OPTIONS.items():
        parser.add_argument(
            f"--{key.replace('_', '-')}", default=default, type=str if isinstance(default, list) else type(default)
        )
    asked = vars(parser.parse_args())
    asked |= {k: asked[k].split(",") for k in ("seeds", "variants") if isinstance(asked[k], str)}
    result = run(asked)
    for name, figures in result["variants"].items():
        print(f"{name:14s} {figures}")
    print(json.dumps({"bench": "learning_options", **result}))


if __name__ == "__main__":
    main()
