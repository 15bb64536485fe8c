"""One GRPO run of TRL's trainer for `bench bridges`: with its own `generate`, or with our engine in its `rollout_func`.

The task is the quickstart's: sums of up to six numbers, by a small decoder that was taught to guess. The last line of
output is one JSON object.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

TASK = {"terms": (2, 6), "max_total": 9}
ANSWER_TOKENS = 40


def problems(n: int, held_out: bool, seed: int) -> list[Any]:
    """Problems of one side; which side a problem is on, its prompt decides."""
    from tidemill.data.generators import is_held_out
    from tidemill.data.tasks import chain

    draw, found = random.Random(seed), list[Any]()
    while len(found) < n:
        problem = chain(draw, **TASK)
        if is_held_out(problem) == held_out:
            found.append(problem)
    return found


def is_right(text: str, answer: str) -> bool:
    from tidemill.reward.verifiers.answers import NUMBER

    numbers = NUMBER.findall(text)
    return bool(numbers) and numbers[-1] == answer


def accuracy(model: Any, tokenizer: Any, held_out: list[Any]) -> float:
    """The share of held-out problems that greedy answers get right, by transformers' own generate."""
    tokenizer.padding_side = "left"
    prompts = tokenizer([p.prompt for p in held_out], return_tensors="pt", padding=True)
    model.eval()
    with torch.no_grad():
        made = model.generate(
            prompts["input_ids"], attention_mask=prompts["attention_mask"], max_new_tokens=ANSWER_TOKENS,
            do_sample=False, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    texts = tokenizer.batch_decode(made[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(is_right(text, p.answer) for text, p in zip(texts, held_out)) / len(held_out)


def train(job: Mapping[str, Any]) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype="float32")
    held_out = problems(job["held_out"], True, 99)
    before = accuracy(model, tokenizer, held_out)
    rows = problems(job["prompts"] * job["steps"], False, job["seed"])
    laps: list[dict[str, float]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            wall, cpu = self.began
            laps.append({"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu})

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(is_right(text, wanted)) for text, wanted in zip(completions, answer)]

    more: dict[str, Any] = {}
    if job["arm"] != "generate":
        from tidemill.bridges.trl import pack, rollout

        more = {"rollout_func": rollout()}
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=job["prompts"] * job["samples"], beta=0.0,
            num_generations=job["samples"], max_completion_length=ANSWER_TOKENS, max_steps=job["steps"],
            learning_rate=job["lr"], lr_scheduler_type="constant", temperature=1.0, seed=job["seed"], use_cpu=True,
            bf16=False, gradient_checkpointing=False, report_to="none", disable_tqdm=True, logging_steps=1000,
            save_strategy="no",
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model, reward_funcs=reward, args=settings, processing_class=tokenizer, callbacks=[Clock()],
            train_dataset=Dataset.from_list([{"prompt": p.prompt, "answer": p.answer} for p in rows]), **more,
        )  # fmt: skip
        if job["arm"] == "packed":
            pack(trainer)
        trainer.train()
    if job["arm"] == "packed":
        from tidemill.bridges.trl import unpack

        unpack(trainer)
    timed = laps[job["warmup"] :]
    found = {name: median(lap[name] for lap in timed) for name in ("wall_s", "cpu_s")}
    return {"accuracy_before": before, "accuracy": accuracy(model, tokenizer, held_out), "steps": len(laps), **found}


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(train(asked)), flush=True)
