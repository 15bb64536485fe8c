"""The learner alone (log-probabilities, GRPO loss, backward, update) on given samples, beside TRL's own loss.

Each system runs in a process of its own. TRL gets the same samples, padded as its trainer pads them, and its fastest
batch size here; its loss is its trainer's, with the same AdamW behind it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.bench import summary

ABOUT = "the learner alone in tokens per CPU-second, with and without shared prompts; peer: trl"
PEERS = {"trl": "trl"}
OPTIONS: dict[str, Any] = {
    "groups": 16,
    "samples": 8,
    "prompt": 48,  # mean tokens; each is drawn between half and one and a half of it
    "response": 64,
    "hidden": 256,
    "layers": 4,
    "steps": 3,  # timed, after one that is not
    "threads": 1,
    "microbatch": 4096,
    "trl_batches": [32, 128],
}
VOCABULARY = 2000


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    systems = ["ours", "ours_unshared", *options["peers"]]
    rounds: dict[str, list[dict[str, float]]] = {s: [] for s in systems}
    for _ in range(int(options["repeats"])):
        for system in systems:
            rounds[system].append(in_process(system, options))
    merged = {s: {k: summary([r[k] for r in parts]) for k in parts[0]} for s, parts in rounds.items()}
    result: dict[str, Any] = {**merged["ours"], "unshared": merged["ours_unshared"], "peers": {}}
    for peer in options["peers"]:
        theirs = merged[peer]
        theirs["ratio_tokens_per_cpu_s"] = result["tokens_per_cpu_s"]["median"] / theirs["tokens_per_cpu_s"]["median"]
        result["peers"][peer] = theirs
    return result


def in_process(system: str, options: Mapping[str, Any]) -> dict[str, float]:
    job = json.dumps({**options, "system": system})
    done = subprocess.run([sys.executable, __file__, job], check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def model_of(job: Mapping[str, Any], attention: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    heads = job["hidden"] // 32
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=job["hidden"], intermediate_size=3 * job["hidden"],
        num_hidden_layers=job["layers"], num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=32,
        tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def samples_of(job: Mapping[str, Any]) -> Any:
    from tidemill.batch import Batch, Column

    rng = np.random.default_rng(0)
    tokens, prompts = [], []
    for _ in range(job["groups"]):
        prompt = rng.integers(3, VOCABULARY, rng.integers(job["prompt"] // 2, job["prompt"] * 3 // 2))
        for _ in range(job["samples"]):
            response = rng.integers(3, VOCABULARY, rng.integers(job["response"] // 2, job["response"] * 3 // 2))
            tokens.append(np.concatenate([prompt, response]))
            prompts.append(len(prompt))
    responses = [len(t) - p for t, p in zip(tokens, prompts)]
    return Batch(
        {
            "id": np.arange(len(tokens)),
            "group": np.repeat(np.arange(job["groups"]), job["samples"]),
            "tokens": Column.jagged(tokens, np.int32),
            "prompt_length": np.array(prompts, np.int32),
            "mask": Column.jagged([np.ones(n) for n in responses], np.uint8),
            "logprobs": Column.jagged([np.full(n, -np.log(VOCABULARY)) for n in responses], np.float32),
            "advantages": rng.normal(size=len(tokens)).astype(np.float32),
        }
    )


def timed(step: Callable[[], None], tokens: int, times: int) -> dict[str, float]:
    step()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(times):
        step()
    wall, cpu = (time.perf_counter() - wall) / times, (time.process_time() - cpu) / times
    return {"tokens_per_s": tokens / wall, "tokens_per_cpu_s": tokens / cpu, "step_s": wall, "step_cpu_s": cpu}


def ours(job: Mapping[str, Any]) -> dict[str, float]:
    from tidemill.algorithms.registry import get
    from tidemill.config import Config
    from tidemill.learn.engine import Learner
    from tidemill.models import attention

    settings = Config.model_validate(
        {
            "algorithm": "grpo",
            "train": {"tokens_per_microbatch": job["microbatch"]},
            "learn": {"share_prompts": job["system"] == "ours"},
        }
    )
    batch = samples_of(job)
    learner = Learner(model_of(job, attention.NAME), settings, get("grpo"), 100)

    def step() -> None:
        learner.accumulate(batch)
        learner.update()

    return timed(step, int(batch["tokens"].lengths.sum()), job["steps"])


def trl(job: Mapping[str, Any]) -> dict[str, float]:
    return max(
        (trl_with(job, int(size)) for size in job["trl_batches"]), key=lambda figures: figures["tokens_per_cpu_s"]
    )


def trl_with(job: Mapping[str, Any], size: int) -> dict[str, float]:
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from tidemill.models.tiny import make_tokenizer

    batch = samples_of(job)
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=size, num_generations=job["samples"], beta=0.0,
            loss_type="grpo", bf16=False, use_cpu=True, gradient_checkpointing=False, report_to="none",
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model_of(job, "sdpa"),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": ["a"] * size}),
            processing_class=make_tokenizer("ab"),
        )
    trainer.current_gradient_accumulation_steps = -(-batch.rows // size)
    model = trainer.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), fused=True)
    parts = [padded(batch, range(at, min(at + size, batch.rows))) for at in range(0, batch.rows, size)]

    def step() -> None:
        for part in parts:
            trainer._compute_loss(model, part).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, int(batch["tokens"].lengths.sum()), job["steps"])


def padded(batch: Any, rows: range) -> dict[str, Any]:
    """Prompts padded on the left and responses on the right, to the longest of this batch."""
    import torch

    def block(parts: list[Any], left: bool) -> tuple[Any, Any]:
        longest = max(map(len, parts))
        ids, mask = (torch.zeros(len(parts), longest, dtype=torch.int64) for _ in range(2))
        for i, part in enumerate(parts):
            place = slice(longest - len(part), None) if left else slice(0, len(part))
            ids[i, place], mask[i, place] = torch.from_numpy(part.astype(np.int64)), 1
        return ids, mask

    starts = batch.values("prompt_length")
    prompt, prompt_mask = block([batch["tokens"][i][: starts[i]] for i in rows], left=True)
    response, response_mask = block([batch["tokens"][i][starts[i] :] for i in rows], left=False)
    return {
        "prompt_ids": prompt, "prompt_mask": prompt_mask, "completion_ids": response,
        "completion_mask": response_mask, "advantages": torch.from_numpy(batch.values("advantages")[list(rows)]),
        "num_items_in_batch": response_mask.sum(),
    }  # fmt: skip


if __name__ == "__main__":
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(int(asked["threads"]))
    print(json.dumps({"ours": ours, "ours_unshared": ours, "trl": trl}[asked["system"]](asked)))
