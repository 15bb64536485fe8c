"""The learner alone (log-probabilities, GRPO loss, backward, update) on given samples, beside TRL's own loss.

Each system runs in a process of its own, round by round; the peer's never imports tidemill. TRL gets the same samples,
padded as its trainer pads them, and its fastest batch size here. On an accelerator: `benchmarks/gpu_learn.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks._learn_trl import VOCABULARY, model_of, timed
from tidemill.bench import peer_environment, summary

HERE = Path(__file__).resolve().parent

ABOUT = "the learner alone in tokens per CPU-second, with and without shared prompts; peer: trl"
PEERS = {"trl": "trl"}
OPTIONS: dict[str, Any] = {
    "groups": 16,
    "samples": 8,
    "prompt": 48,  # mean tokens; each is drawn between half and one and a half of it
    "response": 64,
    "hidden": 256,
    "layers": 4,
    "steps": 3,  # timed, after one that is not; the median counts
    "threads": 1,
    "microbatch": 4096,
    "trl_batches": [32, 128],
}


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    systems = ["ours", "ours_unshared", *options["peers"]]
    rounds: dict[str, list[dict[str, float]]] = {s: [] for s in systems}
    with tempfile.TemporaryDirectory() as folder:
        job = {**options, "file": str(Path(folder) / "samples.npz")}
        np.savez(job["file"], **samples_of(job))
        for _ in range(int(options["repeats"])):
            for system in systems:
                rounds[system].append(in_process(system, job))
    merged = {s: {k: summary([r[k] for r in parts]) for k in parts[0]} for s, parts in rounds.items()}
    result: dict[str, Any] = {**merged["ours"], "unshared": merged["ours_unshared"], "peers": {}}
    for peer in options["peers"]:
        theirs = merged[peer]
        for name, own in (("ratio", result), ("unshared_ratio", result["unshared"])):
            theirs[f"{name}_tokens_per_cpu_s"] = (
                own["tokens_per_cpu_s"]["median"] / theirs["tokens_per_cpu_s"]["median"]
            )
        result["peers"][peer] = theirs
    return result


def in_process(system: str, job: Mapping[str, Any]) -> dict[str, float]:
    program = "_learn_trl.py" if system == "trl" else "learn.py"
    command = [sys.executable, str(HERE / program), json.dumps({**job, "system": system})]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=peer_environment())
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def samples_of(job: Mapping[str, Any]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    tokens, prompts = [], []
    for _ in range(job["groups"]):
        prompt = rng.integers(3, VOCABULARY, rng.integers(job["prompt"] // 2, job["prompt"] * 3 // 2))
        for _ in range(job["samples"]):
            response = rng.integers(3, VOCABULARY, rng.integers(job["response"] // 2, job["response"] * 3 // 2))
            tokens.append(np.concatenate([prompt, response]))
            prompts.append(len(prompt))
    return {
        "tokens": np.concatenate(tokens).astype(np.int32),
        "lengths": np.array([len(t) for t in tokens]),
        "prompts": np.array(prompts, np.int32),
        "advantages": rng.normal(size=len(tokens)).astype(np.float32),
    }


def batch_of(job: Mapping[str, Any]) -> Any:
    from tidemill.batch import Batch, Column

    kept = np.load(job["file"])
    responses = kept["lengths"] - kept["prompts"]
    return Batch(
        {
            "id": np.arange(len(responses)),
            "group": np.repeat(np.arange(job["groups"]), job["samples"]),
            "tokens": Column(kept["tokens"], np.concatenate([[0], np.cumsum(kept["lengths"])])),
            "prompt_length": kept["prompts"],
            "mask": Column.jagged([np.ones(n) for n in responses], np.uint8),
            "logprobs": Column.jagged([np.full(n, -np.log(VOCABULARY)) for n in responses], np.float32),
            "advantages": kept["advantages"],
        }
    )


def ours(job: Mapping[str, Any]) -> dict[str, float]:
    from tidemill.algorithms.shared.registry import get
    from tidemill.learn.engine import Learner
    from tidemill.models.attention import registry as attention
    from tidemill.recipe.config import Config

    settings = Config.model_validate(
        {
            "algorithm": "grpo",
            "train": {"tokens_per_microbatch": job["microbatch"]},
            "learn": {"share_prompts": job["system"] == "ours"},
        }
    )
    batch = batch_of(job)
    learner = Learner(model_of(job, attention.NAME), settings, get("grpo"), 100)

    both = {"accumulate": lambda: learner.accumulate(batch), "update": learner.update}
    return timed(both, batch["tokens"].lengths, learner.model, job["steps"])


if __name__ == "__main__":
    import torch

    asked = json.loads(sys.argv[1])
    torch.set_num_threads(int(asked["threads"]))
    print(json.dumps(ours(asked)))
