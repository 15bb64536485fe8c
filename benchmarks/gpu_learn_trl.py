"""TRL's learner alone on an accelerator: its trainer's own loss, recompute and optimizer on the job of `gpu_learn.py`.

    PYTHONPATH=SITE python benchmarks/gpu_learn_trl.py                  # about a minute and a half on an H200
    PYTHONPATH=SITE python benchmarks/gpu_learn_trl.py --batches 16,32,64

No engine is in the process, so the peak is the learner's. Samples all have one length, so nothing is padded. Old
log-probabilities are not computed, though TRL does so in a step with vLLM: this is less than its step asks of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks._gpu import (
    DATA_SHEET,
    DEVICE,
    EACH,
    GIB,
    ON_DEVICE,
    PROMPT,
    RESPONSE,
    SIZES,
    empty,
    parameters_of,
    peak_gib,
    wait,
    work_of,
)
from benchmarks._learn_trl import padded, tokenizer


def model_of(shape: str) -> Any:
    from transformers import AutoModelForCausalLM, Qwen2Config

    vocabulary, hidden, intermediate, layers, heads, kv_heads, dim, tied = SIZES[shape]
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim, tie_word_embeddings=tied,
        max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    with DEVICE:
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)


def trainer_of(model: Any, size: int, samples: int) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=folder, per_device_train_batch_size=size, gradient_accumulation_steps=samples // size,
                num_generations=EACH, beta=0.0, learning_rate=1e-6, temperature=1.0, bf16=ON_DEVICE,
                use_cpu=not ON_DEVICE, gradient_checkpointing=True, report_to="none",
            ),
            train_dataset=Dataset.from_dict({"prompt": ["a"] * samples}),
            processing_class=tokenizer(),
        )  # fmt: skip
    trainer.current_gradient_accumulation_steps = samples // size
    if not trainer.model.is_gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    trainer.model.config.use_cache = False
    return trainer


def measure(model: Any, size: int, groups: int) -> dict[str, float]:
    samples, vocabulary = groups * EACH, model.config.vocab_size
    trainer = trainer_of(model, size, samples)
    model = trainer.model.train()
    trainer.create_optimizer()
    rng = np.random.default_rng(0)
    tokens = [rng.integers(3, vocabulary, PROMPT + RESPONSE) for _ in range(samples)]
    prompts, advantages = [PROMPT] * samples, rng.normal(size=samples).astype(np.float32)
    parts = [
        padded(tokens[at : at + size], prompts[at : at + size], advantages[at : at + size])
        for at in range(0, samples, size)
    ]

    def update(count: int) -> None:
        for part in parts[:count]:
            held = {name: value.to(DEVICE) for name, value in part.items()}
            with trainer.compute_loss_context_manager():
                loss = trainer._compute_loss(model, held)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        trainer.optimizer.step()
        model.zero_grad()
        wait()

    update(2)
    if ON_DEVICE:
        torch.accelerator.reset_peak_memory_stats()
    began = time.perf_counter()
    update(len(parts))
    spent = time.perf_counter() - began
    flops = work_of(model, samples, groups, False, parameters_of(model))[1]
    return {
        "step_s": spent, "tokens_per_s": samples * (PROMPT + RESPONSE) / spent, "peak_gib": peak_gib(),
        "mfu_data_sheet": flops / spent / DATA_SHEET, "weights_gib": sum(p.nbytes for p in model.parameters()) / GIB,
    }  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--batches", default="32,16", help="samples in a pass, tried in turn")
    options.add_argument("--shape", default="1.5b")
    options.add_argument("--groups", type=int, default=64)
    asked = options.parse_args()
    found: dict[str, Any] = {}
    for size in map(int, asked.batches.split(",")):
        try:
            found[str(size)] = measure(model_of(asked.shape), size, asked.groups)
        except torch.OutOfMemoryError:
            found[str(size)] = {"out_of_memory": True}
        print(f"TRL's learner, {size} samples a pass: {found[str(size)]}", flush=True)
        empty()
    print(json.dumps({"bench": "gpu_learn_trl", "batches": found}))


if __name__ == "__main__":
    main()
