"""A whole GRPO step on one accelerator beside TRL with vLLM: tokens/s, where the step's time goes, memory, energy.

    PYTHONPATH=SITE:src python benchmarks/gpu_step.py --shapes 1.5b     # about four minutes on an H200, TRL included

64 prompts × 8 samples of 256 + 512 tokens; random weights, so no response ends early. Each system is a process of its
own, the peer's without tidemill in it. Device power is sampled by this process; energy counts the timed steps alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent)]

ABOUT = "a whole GRPO step on one accelerator: tokens/s, time by part, peak memory, energy per token; peer: trl"
PEERS = {"trl": "trl"}
OPTIONS: dict[str, Any] = {
    "shapes": ["1.5b", "0.5b"],
    "steps": 2,  # timed
    "warmup": 1,  # steps before them: kernels are compiled and graphs captured there
    "prompts": 64,
    "samples": 8,
    "prompt": 256,
    "response": 512,
    "microbatch": 16384,
    "logprob_chunk": 8192,
    "recompute": "none",
    "schedule": "sync",
    "trl_batch": 32,
    "vllm": True,  # for TRL
    "limit_s": 340.0,  # of one system
}
# The machine this is for has no network; FlashInfer cannot be there, and its sampler would be tried.
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "WANDB_MODE": "off"}


class Power:
    """Watts of the device and bytes in use there, sampled all along."""

    def __init__(self, every_s: float = 0.2) -> None:
        self.every_s = every_s
        self.samples: list[tuple[float, float]] = []
        self.most_bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        from tidemill import device

        chosen = device.pick("auto")
        while not self._done.wait(self.every_s):
            watts = chosen.power_w()
            if watts is None:
                return
            self.samples.append((time.time(), watts))

    def joules(self, start: float, end: float) -> float | None:
        """Trapezoids over the samples inside, the first and last stretched to the ends."""
        inside = [(t, w) for t, w in self.samples if start <= t <= end]
        if len(inside) < 2:
            return None
        points = [(start, inside[0][1]), *inside, (end, inside[-1][1])]
        return sum((t1 - t0) * (w0 + w1) / 2 for (t0, w0), (t1, w1) in itertools.pairwise(points))

    def close(self) -> None:
        self._done.set()
        self._thread.join()


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    power = Power()
    cases: dict[str, Any] = {}
    try:
        for shape in options["shapes"]:
            with tempfile.TemporaryDirectory() as folder:
                cases[shape] = case(shape, Path(folder), options, power)
    finally:
        power.close()
    first = next(iter(cases.values()))
    return {**first, "cases": cases}


def case(shape: str, folder: Path, options: Mapping[str, Any], power: Power) -> dict[str, Any]:
    steps = options["steps"] + options["warmup"]
    job = {**options, "shape": shape, "steps": steps, "model": str(folder / "model")}
    job["prompts_file"] = str(folder / "prompts.jsonl")
    child("_step_trl.py", {**job, "do": "make"}, OFFLINE)
    found = figures(child("_step_ours.py", job, {}), options, power)
    found["peers"] = {}
    if "trl" in options["peers"]:
        theirs = figures(child("_step_trl.py", {**job, "do": "train"}, OFFLINE), options, power)
        if "tokens_per_s" in theirs and "tokens_per_s" in found:
            theirs["ratio_tokens_per_s"] = found["tokens_per_s"] / theirs["tokens_per_s"]
        found["peers"]["trl"] = theirs
    return found


def child(program: str, job: Mapping[str, Any], extra: Mapping[str, str]) -> dict[str, Any]:
    """Its last line that is a JSON object; all of its output goes to our errors."""
    from tidemill.bench import peer_environment

    command = [sys.executable, str(HERE / program), json.dumps(job)]
    is_ours = program == "_step_ours.py" or job.get("takes_ours", False)
    paths = [str(HERE.parent / "src"), str(HERE.parent)] if is_ours else []
    clean = peer_environment()
    path = os.pathsep.join([*filter(None, [clean.get("PYTHONPATH")]), *paths])
    process = subprocess.Popen(
        command, env={**clean, **extra, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    stop = threading.Timer(job["limit_s"], process.kill)
    stop.start()
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip())
        print(f"  {program[6:-3]} | {lines[-1][:400]}", file=sys.stderr, flush=True)
    code = process.wait()
    stop.cancel()
    results = [line for line in lines if line.startswith('{"')]  # libraries may have last words of their own
    if code != 0 or not results:
        return {"error": f"{program} ended with {code}: " + " / ".join(lines[-3:])[-800:]}
    result: dict[str, Any] = json.loads(results[-1])
    return result


def figures(result: Mapping[str, Any], options: Mapping[str, Any], power: Power) -> dict[str, Any]:
    if "laps" not in result:
        return dict(result)
    laps = result["laps"][options["warmup"] :]
    seconds = [lap["end"] - lap["start"] for lap in laps]
    tokens = sum(lap["tokens"] for lap in laps)
    parts = sorted({key for lap in laps for key in lap if key.endswith("_s")} - {"step_s"})
    energy = power.joules(laps[0]["start"], laps[-1]["end"])
    found: dict[str, Any] = {
        "tokens_per_s": tokens / sum(seconds),
        "step_s": median(seconds),
        "parts_s": {key.removesuffix("_s"): round(median(lap.get(key, 0.0) for lap in laps), 3) for key in parts},
        "tokens_per_step": tokens / len(laps),
        "first_step_s": result["laps"][0]["end"] - result["laps"][0]["start"],
        "steps_s": [round(s, 3) for s in seconds],
        **{key: value for key, value in result.items() if key.endswith("_gib")},
    }
    if energy is not None:
        found["watts"] = energy / (laps[-1]["end"] - laps[0]["start"])
        found["joules_per_token"] = energy / tokens
    return found


def show(name: str, found: Mapping[str, Any]) -> None:
    if "error" in found:
        print(f"{name:24s} FAILED: {found['error']}")
        return
    energy = f", {found['joules_per_token']:.4f} J/token at {found['watts']:.0f} W" if "watts" in found else ""
    parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in found["parts_s"].items())
    print(
        f"{name:24s} {found['tokens_per_s']:10,.0f} tokens/s, step {found['step_s']:.2f} s ({parts}), "
        f"peak {found['peak_gib']:.1f} GiB{energy}"
    )


def main() -> None:
    options = argparse.ArgumentParser()
    for key, default in OPTIONS.items():
        kind = str if isinstance(default, list | bool) else type(default)
        options.add_argument(f"--{key.replace('_', '-')}", default=default, type=kind)
    options.add_argument("--peers", default="trl", help="trl, or nothing")
    asked = vars(options.parse_args())
    asked["shapes"] = asked["shapes"].split(",") if isinstance(asked["shapes"], str) else asked["shapes"]
    asked["vllm"] = str(asked["vllm"]).lower() == "true"
    asked["peers"] = [p for p in asked["peers"].split(",") if p]
    result = run(asked)
    for shape, found in result["cases"].items():
        show(f"{shape} tidemill", found)
        for peer, theirs in found.get("peers", {}).items():
            show(f"{shape} {peer}", theirs)
            if "ratio_tokens_per_s" in theirs:
                print(f"{shape} ratio                {theirs['ratio_tokens_per_s']:.2f} × tokens/s")
    print(json.dumps({"bench": "gpu_step", **result}))


if __name__ == "__main__":
    main()
