"""TRL's half of `bench learn`, and the model both halves build. A program of its own that never imports tidemill.

The samples come from a file, padded as TRL's trainer pads them; the loss is its trainer's, AdamW its default optimizer.
The last line of output is one JSON object.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

VOCABULARY = 2000


def model_of(job: Mapping[str, Any], attention: str) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3Config

    heads = job["hidden"] // 32
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=job["hidden"], intermediate_size=3 * job["hidden"],
        num_hidden_layers=job["layers"], num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=32,
        tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def timed(parts: Mapping[str, Callable[[], Any]], lengths: Any, model: Any, times: int) -> dict[str, float]:
    """Of one update, made of `parts` in order: the median of `times`, after one that is not timed."""
    for part in parts.values():
        part()
    laps = [lap(parts) for _ in range(times)]
    middle = sorted(laps, key=lambda spent: spent["cpu"])[len(laps) // 2]
    tokens, wall, cpu = int(lengths.sum()), middle["wall"], middle["cpu"]
    return {
        "tokens_per_s": tokens / wall, "tokens_per_cpu_s": tokens / cpu, "step_s": wall, "step_cpu_s": cpu,
        **{f"{name}_s": middle[name] for name in parts}, "mfu": work(model, lengths) / cpu / rate(),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }  # fmt: skip


def lap(parts: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    spent: dict[str, float] = {}
    wall, cpu = time.perf_counter(), time.process_time()
    for name, part in parts.items():
        began = time.perf_counter()
        part()
        spent[name] = time.perf_counter() - began
    return {**spent, "wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def work(model: Any, lengths: Any) -> float:
    """What must be computed for all samples, each with its prompt: 6·N·T and causal attention."""
    c = model.config
    pairs = float((lengths.astype(np.float64) ** 2).sum() / 2)
    attention = 12 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * pairs
    return 6 * sum(p.numel() for p in model.parameters()) * int(lengths.sum()) + attention


def rate(side: int = 1024) -> float:
    """Operations a CPU-second of a float32 product here and now, with the same threads."""
    a, b = torch.randn(side, side), torch.randn(side, side)
    a @ b
    cpu = time.process_time()
    for _ in range(5):
        a @ b
    return 5 * 2 * side**3 / (time.process_time() - cpu)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1, "a": 2}, unk_token="a"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="a", padding_side="left"
    )


def trl(job: Mapping[str, Any], size: int) -> dict[str, float]:
    """With `size` samples in a forward pass."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    kept = np.load(job["file"])
    tokens = np.split(kept["tokens"], np.cumsum(kept["lengths"])[:-1])
    prompts, advantages = kept["prompts"], kept["advantages"]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model_of(job, "sdpa"),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=folder, per_device_train_batch_size=size, num_generations=job["samples"], beta=0.0,
                loss_type="grpo", bf16=False, use_cpu=True, gradient_checkpointing=False, report_to="none",
            ),
            train_dataset=Dataset.from_dict({"prompt": ["a"] * size}),
            processing_class=tokenizer(),
        )  # fmt: skip
    trainer.current_gradient_accumulation_steps = -(-len(tokens) // size)
    model = trainer.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), fused=True)
    parts = [
        padded(tokens[at : at + size], prompts[at : at + size], advantages[at : at + size])
        for at in range(0, len(tokens), size)
    ]

    def accumulate() -> None:
        for part in parts:
            trainer._compute_loss(model, part).backward()

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    both = {"accumulate": accumulate, "update": update}
    return {**timed(both, kept["lengths"], model, job["steps"]), "batch": size}


def padded(tokens: list[Any], prompts: Any, advantages: Any) -> dict[str, Any]:
    """Prompts padded on the left and responses on the right, to the longest of these."""

    def block(parts: list[Any], left: bool) -> tuple[Any, Any]:
        longest = max(map(len, parts))
        ids, mask = (torch.zeros(len(parts), longest, dtype=torch.int64) for _ in range(2))
        for i, part in enumerate(parts):
            place = slice(longest - len(part), None) if left else slice(0, len(part))
            ids[i, place], mask[i, place] = torch.from_numpy(part.astype(np.int64)), 1
        return ids, mask

    prompt, prompt_mask = block([t[:n] for t, n in zip(tokens, prompts)], left=True)
    response, response_mask = block([t[n:] for t, n in zip(tokens, prompts)], left=False)
    return {
        "prompt_ids": prompt, "prompt_mask": prompt_mask, "completion_ids": response,
        "completion_mask": response_mask, "advantages": torch.from_numpy(advantages),
        "num_items_in_batch": response_mask.sum(),
    }  # fmt: skip


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(int(asked["threads"]))
    found = [trl(asked, int(size)) for size in asked["trl_batches"]]
    print(json.dumps(max(found, key=lambda figures: figures["tokens_per_cpu_s"])))
