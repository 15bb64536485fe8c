"""A run whose rollout and learning share one accelerator, with each choice of `flow.hand_over`: the same numbers, what
the device holds in each phase, and how long handing over takes.

    PYTHONPATH=SITE:src python benchmarks/gpu_handover.py      # about three minutes on an H200

A decoder of 425 million random weights learns GRPO with a frozen reference; rewards are noise. Each choice is a process
of its own, and `never` runs twice: what the two differ by is what the device's own sums differ by. Without an
accelerator a tiny decoder takes its place, to try the script: nothing is then told of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent)]

ABOUT = "rollout and learning on one accelerator take turns with its memory: same numbers, bytes by phase, seconds"
PEERS: dict[str, str] = {}
OPTIONS: dict[str, Any] = {"steps": 4, "cache_tokens": 400_000, "limit_s": 200.0}
CHOICES = ("never", "cache", "all")
GIB = 2**30
LARGE = {"hidden": 1536, "layers": 12, "heads": 12, "kv_heads": 4, "intermediate": 6144, "window": 512}
SMALL = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 48, "window": 64}
ABOUT_TIME = ("time/", "idle/", "handed_over/", "machine/", "cost/")


def noise(sample: Any) -> float:
    """A reward of its own for every sample: groups of equal rewards would teach nothing."""
    return random.Random(sample.id).random()


def recipe(choice: str, folder: str, options: Mapping[str, Any], on_device: bool) -> dict[str, Any]:
    learn = {"lr": 1e-5, "moments": "float32"} if on_device else {"lr": 1e-2}
    cache = options["cache_tokens"] if on_device else None
    return {
        "name": "turns",
        "folder": folder,
        "deterministic": bool(options.get("deterministic", True)),
        "model": {"tiny": LARGE if on_device else SMALL, "dtype": "bfloat16" if on_device else "float32"},
        "data": {"source": "chain", "args": {"terms": 3, "max_total": 9}, "max_prompt_tokens": 16},
        "train": {"steps": options["steps"], "prompts_per_step": 32 if on_device else 4, "samples_per_prompt": 8},
        "rollout": {"max_new_tokens": 256 if on_device else 8, "cache_tokens": cache},
        "rewards": [{"function": "noise"}],
        "algorithm": {"name": "grpo", "kl": {"coef": 0.05}},
        "learn": learn,
        "flow": {"hand_over": choice},
        "eval": {"before": False, "after": False, "size": 0},
        "checkpoint": {"every": 0},
        "observe": {"tensorboard": False, "samples_per_step": 0, "progress": "off"},
    }


class Phases:
    """Bytes in use on the device at the end of each phase: what was freed in it, torch still holds."""

    def __init__(self) -> None:
        from tidemill import device

        self.device = device.pick("auto")
        self.is_on_device = self.device.kind != "cpu"
        self.now = ""
        self.held: dict[str, list[int]] = {"rollout": [], "learning": []}

    def turn(self, to: str) -> None:
        if not self.is_on_device or to == self.now:
            return
        if self.now:
            self.device.synchronize()
            memory = self.device.memory()
            self.held[self.now].append(memory.total - memory.free)
        self.now = to

    def largest(self) -> dict[str, float]:
        """Of the steps after the first, which has no moments yet."""
        return {f"{name}_gib": max(found[1:]) / GIB for name, found in self.held.items() if len(found) > 1}


@contextmanager
def watched(phases: Phases) -> Iterator[None]:
    from tidemill.flow.handover import Handover

    rolling, learning = Handover.rolling, Handover.learning

    def turn(to: str, take: Any) -> Any:
        def taken(self: Handover) -> None:
            phases.turn(to)
            take(self)

        return taken

    Handover.rolling, Handover.learning = turn("rollout", rolling), turn("learning", learning)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Handover.rolling, Handover.learning = rolling, learning  # type: ignore[method-assign]


def train(choice: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """One choice, in this process."""
    from tidemill.reward.registry import BUILT_IN, BuiltIn
    from tidemill.run import start as launch

    BUILT_IN["noise"] = BuiltIn("benchmarks.gpu_handover:noise", True)
    phases = Phases()
    with tempfile.TemporaryDirectory() as folder, watched(phases):
        launch.train(recipe(choice, folder, options, phases.is_on_device))
        lines = [json.loads(line) for line in (Path(folder) / "turns" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    later = steps[1:]
    numbers = [{k: v for k, v in s.items() if not k.startswith(ABOUT_TIME) and "per_s" not in k} for s in steps]
    return {
        "choice": choice,
        "deterministic": bool(options.get("deterministic", True)),
        "device": phases.device.name,
        **phases.largest(),
        "step_s": median(s["time/step"] for s in later),
        "hand_over_s": median(s.get("time/hand_over", 0.0) for s in later),
        "cache_freed_gib": median(s.get("handed_over/cache_bytes", 0.0) for s in later) / GIB,
        "state_freed_gib": median(s.get("handed_over/state_bytes", 0.0) for s in later) / GIB,
        "numbers": numbers,
    }


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    found = {"never": tried("never", options)}
    options = {**options, "deterministic": found["never"]["deterministic"]}
    found |= {name: child(choice, options) for name, choice in (("again", "never"), ("cache", "cache"), ("all", "all"))}
    plain = found["never"].pop("numbers")
    for name in ("again", "cache", "all"):
        found[name]["largest_difference"] = difference(plain, found[name].pop("numbers"))
    noise_floor = found["again"]["largest_difference"]
    same = all(found[name]["largest_difference"] <= noise_floor for name in ("cache", "all"))
    return {"same_numbers": same, "noise": noise_floor, "choices": found}


def tried(choice: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """With deterministic operations, where the device has them all."""
    try:
        return child(choice, {**options, "deterministic": True})
    except SystemExit as error:
        print(f"not deterministic here: {str(error)[-800:]}", file=sys.stderr, flush=True)
        return child(choice, {**options, "deterministic": False})


def difference(a: list[dict[str, float]], b: list[dict[str, float]]) -> float:
    """The largest, relative where values are larger than 1."""
    if [line.keys() for line in a] != [line.keys() for line in b]:
        return float("inf")
    return max(abs(x[k] - y[k]) / max(1.0, abs(x[k])) for x, y in zip(a, b, strict=True) for k in x)


def child(choice: str, options: Mapping[str, Any]) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__)), "--choice", choice, "--options", json.dumps(dict(options))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=options["limit_s"], env=os.environ)
    results = [line for line in done.stdout.splitlines() if line.startswith('{"choice"')]
    if done.returncode or not results:
        raise SystemExit(f"{choice} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(results[-1])
    print(f"  {choice:6} " + "  ".join(f"{k} {v:.2f}" for k, v in result.items() if isinstance(v, float)), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=ABOUT)
    parser.add_argument("--choice", choices=CHOICES, help="this one alone, in this process")
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--steps", type=int, default=OPTIONS["steps"])
    given = parser.parse_args()
    options = {**OPTIONS, "steps": given.steps, **given.options}
    print(json.dumps(train(given.choice, options) if given.choice else run(options)))


if __name__ == "__main__":
    main()
