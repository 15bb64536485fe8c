"""TRL's half of `gpu_step` and `gpu_bridges`, and the model all systems load. A program of its own, which imports
tidemill only where TRL's trainer is to roll out with our engine.

Settings are TRL's documented way to be fast on one device: vLLM in the same process (colocate), bfloat16, gradient
checkpointing, 32 samples a pass. The last line of output is one JSON object.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 151936
SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2},
}
LETTERS = "qwertyuiopxzvnm"  # no two of them ever stand together in what the tokenizer learned from: one token each
OURS = ("rollout", "packed")  # what TRL's trainer takes from us: the engine, and the packed log-probs too
GIB = 2**30


def make(shape: str, folder: str) -> None:
    """A decoder (Qwen2 unless the shape names another) with random weights and a tokenizer of bytes, as a folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<pad>", "<start>", "<end>"]
    words.train_from_iterator(
        ["abc 123"],
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", pad_token="<pad>", padding_side="left"
    )
    on_device = torch.accelerator.is_available()
    usual = {"model_type": "qwen2", "vocab_size": VOCABULARY if on_device else 1000, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        **{**usual, **SHAPES[shape]}, tie_word_embeddings=True, max_position_embeddings=32768, eos_token_id=2,
        pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(torch.accelerator.current_accelerator() if on_device else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if on_device else torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prompts_of(job: dict[str, Any]) -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices(LETTERS, k=job["prompt"])) for _ in range(job["prompts"] * job["steps"])]


def train(job: dict[str, Any]) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    on_device = torch.accelerator.is_available()
    samples = job["prompts"] * job["samples"]
    draw = random.Random(0)
    laps: list[dict[str, float]] = []
    spent = {"generate": 0.0}

    def wait() -> None:
        if on_device:
            torch.accelerator.synchronize()

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.start, self.tokens = time.time(), 0.0

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **__: Any) -> None:
            if "num_tokens" not in (logs or {}):
                return
            wait()
            end, tokens = time.time(), float(logs["num_tokens"])
            lap = {"start": self.start, "end": end, "tokens": tokens - self.tokens, "rollout_s": spent["generate"]}
            laps.append({**lap, "learn_s": end - self.start - spent["generate"], "learn_peak_gib": peak_gib()})
            self.start, self.tokens, spent["generate"] = end, tokens, 0.0
            print(f"TRL step {len(laps)}: {laps[-1]}", flush=True)

    def peak_gib() -> float:
        return torch.accelerator.max_memory_allocated() / GIB if on_device else 0.0

    arm = job.get("arm") or ("vllm" if job["vllm"] else "generate")
    more: dict[str, Any] = {}
    if arm in OURS:
        from tidemill.bridges.trl import pack, rollout

        more = {"rollout_func": rollout()}
    ways: dict[str, dict[str, Any]] = {name: {"generation_kwargs": {"ignore_eos": True}} for name in OURS}
    ways["generate"] = {"generation_kwargs": {"min_new_tokens": job["response"]}}
    ways["vllm"] = {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.35,
        "vllm_max_model_length": max(1024, job["prompt"] + job["response"]), "generation_kwargs": {"ignore_eos": True},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=job["trl_batch"],
            gradient_accumulation_steps=samples // job["trl_batch"], num_generations=job["samples"],
            max_completion_length=job["response"], max_steps=job["steps"], learning_rate=1e-6, beta=0.0,
            temperature=1.0, bf16=on_device, use_cpu=not on_device, gradient_checkpointing=True, logging_steps=1,
            save_strategy="no", report_to="none", disable_tqdm=True,
            model_init_kwargs={"dtype": "bfloat16" if on_device else "float32"}, **ways[arm],
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=job["model"],
            reward_funcs=lambda completions, **_: [draw.random() for _ in completions],
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": prompts_of(job)}),
            callbacks=[Clock()],
            **more,
        )
        if arm == "packed":
            pack(trainer)
        at_rest = torch.accelerator.memory_allocated() / GIB if on_device else 0.0
        weights = sum(p.nbytes for p in trainer.model.parameters()) / GIB
        generate = trainer._generate_and_score_completions
        peaks: list[float] = []

        def timed(*args: Any, **kwargs: Any) -> Any:
            wait()
            began = time.time()
            made = generate(*args, **kwargs)
            wait()
            spent["generate"] += time.time() - began
            peaks.append(peak_gib())
            if on_device:
                torch.accelerator.reset_peak_memory_stats()
            return made

        trainer._generate_and_score_completions = timed
        trainer.train()
    learn_peak = max(lap["learn_peak_gib"] for lap in laps)
    return {
        "laps": laps,
        "peak_gib": max([learn_peak, *peaks]),
        "learn_peak_gib": learn_peak,
        # What the engine in the same process holds at rest is not the learner's.
        "learner_alone_peak_gib": learn_peak - max(0.0, at_rest - weights),
    }


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    if asked["do"] == "make":
        make(asked["shape"], asked["model"])
        Path(asked["prompts_file"]).write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts_of(asked)))
        print(json.dumps({"made": asked["model"]}))
    else:
        print(json.dumps(train(asked)))
