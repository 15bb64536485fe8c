"""Settings whose whole GRPO steps are measured on an accelerator, to check the model of time and the search.

None of them is a calibration's: models have their published depth, steps their own sizes and lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

VOCABULARY = 151_936
FAMILIES: dict[str, dict[str, Any]] = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2},
    "3b": {"hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36, "num_attention_heads": 16,
           "num_key_value_heads": 2},
    "7b": {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "tie_word_embeddings": False},
    # Qwen3-30B-A3B's layers, twelve of them, with half of its experts: what fits beside gradients and moments.
    "moe": {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 12,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 64,
            "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": 320},
}  # fmt: skip


def model_settings(name: str, layers: int | None = None) -> dict[str, Any]:
    """config.json of a model. `layers`: fewer of them, for who only wants its kernels compiled."""
    plain = {
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32_768,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "bos_token_id": None,
        **FAMILIES[name],
    }
    return plain | ({"num_hidden_layers": layers} if layers else {})


@dataclass(frozen=True)
class Setting:
    model: str
    prompts: int
    prompt: int
    response: int
    micro: int = 16_384
    concurrent: int = 128
    each: int = 8
    learn: dict[str, Any] = field(default_factory=dict)
    steps: int = 2  # the first of them compiles and is not timed

    @property
    def name(self) -> str:
        own = "".join(f" {k}={v}" for k, v in self.learn.items())
        lengths = f"{self.prompts}x{self.each} of {self.prompt}+{self.response}"
        return f"{self.model} {lengths} micro={self.micro} at-once={self.concurrent}{own}"

    def recipe(self, model: str, prompts_file: str, folder: str, dtype: str = "bfloat16") -> dict[str, Any]:
        return {
            "name": "step",
            "folder": folder,
            "model": {"path": model, "dtype": dtype},
            "data": {"source": prompts_file, "held_out": 0, "max_prompt_tokens": self.prompt, "chat": "off"},
            "train": {
                "steps": self.steps,
                "prompts_per_step": self.prompts,
                "samples_per_prompt": self.each,
                "tokens_per_microbatch": self.micro,
            },
            "rollout": {"max_new_tokens": self.response, "concurrent": self.concurrent},
            "rewards": [{"function": "noise"}],
            "algorithm": "grpo",
            "learn": {"lr": 1e-6, **self.learn},
            "eval": {"before": False, "after": False, "size": 0},
            "checkpoint": {"every": 0},
            "observe": {"tensorboard": False, "samples_per_step": 0, "progress": "off"},
        }


LORA, FP8 = {"lora_rank": 16}, {"fp8": "tensorwise"}
# By model and by what is compiled, so that one follows the other in one process.
PREDICTED: tuple[Setting, ...] = (
    Setting("0.5b", 24, 128, 256),
    Setting("0.5b", 12, 512, 1024, concurrent=96),
    Setting("0.5b", 24, 256, 384, learn=LORA),
    Setting("1.5b", 32, 128, 192, concurrent=256),
    Setting("1.5b", 16, 256, 512),
    Setting("1.5b", 6, 512, 1536, concurrent=48),
    Setting("1.5b", 16, 256, 512, learn=LORA),
    Setting("1.5b", 16, 256, 512, learn=FP8),
    Setting("3b", 12, 256, 384, concurrent=96),
    Setting("3b", 12, 256, 384, concurrent=96, learn={**LORA, "recompute": "full"}),
    Setting("7b", 8, 256, 256, concurrent=64),
    Setting("7b", 4, 512, 1024, concurrent=32, micro=8192),
    Setting("7b", 8, 256, 256, concurrent=64, learn=LORA),
    Setting("moe", 12, 256, 256, concurrent=96),
    Setting("moe", 6, 256, 768, concurrent=48),
)
# An exhaustive sweep, for the search: every combination of these.
SWEPT_MICRO, SWEPT_AT_ONCE, SWEPT_RECOMPUTE = (2048, 4096, 8192, 32_768), (32, 64, 128), ("none", "full")


def sweep() -> Iterator[Setting]:
    for recompute, micro, at_once in product(SWEPT_RECOMPUTE, SWEPT_MICRO, SWEPT_AT_ONCE):
        learn = {} if recompute == "none" else {"recompute": recompute}
        yield Setting("0.5b", 16, 256, 320, micro=micro, concurrent=at_once, learn=learn)


def everything() -> tuple[Setting, ...]:
    found = [*PREDICTED, *sweep()]
    models = list(FAMILIES)
    return tuple(sorted(found, key=lambda s: (models.index(s.model), str(sorted(s.learn.items())))))
