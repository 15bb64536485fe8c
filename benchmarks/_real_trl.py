"""TRL's half of `bench real`: GRPO from the same supervised model, on the same problems in the same order, with the
same batch, learning rate and verdict, and vLLM in TRL's own process on a GPU.

Checkpoints are written between steps, outside of the seconds, and judged afterwards by `tidemill eval`, as ours are.
The last line of output is one JSON object: the seconds of training before each checkpoint.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch


def problems(config: Any) -> list[dict[str, str]]:
    """What our run draws, in its order."""
    from tidemill.data.source import Order, open_source

    source, _ = open_source(config.data, config.seed)
    order = Order(source, config.seed)
    count = config.train.steps * config.train.prompts_per_step
    drawn = [source.example(order(position)) for position in range(count)]
    return [{"prompt": str(example.prompt), "answer": example.answer} for example in drawn]


def verdicts(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    from tidemill.reward.api import Sample
    from tidemill.reward.math import verdict

    return [
        float(verdict.math(Sample(prompt, response, gold)))
        for prompt, response, gold in zip(prompts, completions, answer)
    ]


def settings_of(config: Any, folder: Path, every: int, pass_size: int) -> Any:
    """The recipe in TRL's words. A step of ours is one generation, from which TRL learns as often."""
    from trl import GRPOConfig

    train, learn, rollout = config.train, config.learn, config.rollout
    updates = train.updates_per_step
    in_update = train.prompts_per_step * train.samples_per_prompt // updates
    on_device = torch.accelerator.is_available()
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.35} if on_device else {}
    return GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=min(pass_size, in_update),
        gradient_accumulation_steps=max(1, in_update // pass_size), steps_per_generation=None,
        generation_batch_size=in_update * updates, num_generations=train.samples_per_prompt,
        max_completion_length=rollout.max_new_tokens, temperature=rollout.temperature, max_steps=train.steps * updates,
        learning_rate=learn.lr, lr_scheduler_type="constant_with_warmup", warmup_steps=learn.warmup_steps,
        adam_beta1=learn.betas[0], adam_beta2=learn.betas[1], adam_epsilon=learn.eps, weight_decay=learn.weight_decay,
        max_grad_norm=learn.clip_norm or 0.0, beta=0.0, loss_type="grpo", epsilon=config.algorithm.clip_low,
        epsilon_high=config.algorithm.clip_high, shuffle_dataset=False, seed=config.seed, bf16=on_device,
        use_cpu=not on_device, gradient_checkpointing=on_device, report_to="none", disable_tqdm=True,
        logging_steps=1, save_strategy="steps", save_steps=every * updates, save_only_model=True, **vllm,
    )  # fmt: skip


def train(job: Mapping[str, Any]) -> list[dict[str, float]]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    from tidemill.recipe.load import load

    config = load(job["config"]).config
    updates = config.train.updates_per_step
    laps: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            laps.append(time.perf_counter() - self.began)

    trainer = GRPOTrainer(
        model=job["model"], reward_funcs=verdicts, train_dataset=Dataset.from_list(problems(config)),
        args=settings_of(config, Path(job["folder"]), job["every"], job["pass"]), callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(Path(job["folder"]) / f"checkpoint-{len(laps)}"))
    spent = [0.0, *accumulate(laps)]
    steps = [*range(job["every"] * updates, len(laps), job["every"] * updates), len(laps)]
    return [{"step": step // updates, "seconds": spent[step], "checkpoint": step} for step in steps]


if __name__ == "__main__":
    print(json.dumps(train(json.loads(sys.argv[1]))), flush=True)
