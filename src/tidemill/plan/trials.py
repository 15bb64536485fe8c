"""What a calibration runs: small models of several widths, few layers deep, in our own engine and learner.

Sizes differ by device: a CPU is measured with models that a CPU trains, an accelerator with layers as wide as those of
models from 0.5 B to 7 B parameters, a few of each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TrialModel:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int = 0
    experts: int = 0
    experts_per_token: int = 0

    def settings(self, window: int) -> dict[str, Any]:
        """In config.json's words."""
        plain: dict[str, Any] = {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim or self.hidden // self.heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": window,
            "tie_word_embeddings": True,
        }
        if self.experts:
            return plain | {
                "model_type": "qwen3_moe",
                "num_experts": self.experts,
                "num_experts_per_tok": self.experts_per_token,
                "moe_intermediate_size": self.intermediate,
            }
        return plain | {"model_type": "qwen3"}


@dataclass(frozen=True, slots=True)
class EngineTrial:
    rows: int
    prompt: int
    steps: int  # decoded after the prompt


@dataclass(frozen=True, slots=True)
class LearnTrial:
    groups: int
    each: int
    prompt: int
    response: int
    learn: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trials:
    dtype: str
    rows: tuple[int, ...]  # of the grid of matrix products
    elements: tuple[int, ...]
    copy_bytes: int
    engines: tuple[tuple[TrialModel, tuple[EngineTrial, ...]], ...]
    learners: tuple[tuple[TrialModel, tuple[LearnTrial, ...]], ...]


def on_cpu() -> Trials:
    small = TrialModel(64, 160, 2, 4, 2, 100)
    usual = TrialModel(128, 384, 4, 4, 2, 100)
    wide = TrialModel(256, 768, 4, 8, 4, 100)
    deep = TrialModel(192, 512, 8, 6, 2, 2000)
    engines = (EngineTrial(2, 16, 12), EngineTrial(8, 24, 12), EngineTrial(32, 24, 12), EngineTrial(128, 16, 10))
    long = (EngineTrial(16, 150, 10), EngineTrial(64, 96, 8))
    passes = (
        LearnTrial(1, 2, 16, 16),
        LearnTrial(4, 4, 16, 20),
        LearnTrial(8, 8, 16, 20),
        LearnTrial(4, 8, 24, 90),
        LearnTrial(8, 8, 24, 40, {"share_prompts": False}),
    )
    more = (LearnTrial(4, 8, 24, 40, {"recompute": "full"}), LearnTrial(4, 8, 24, 40, {"lora_rank": 8}))
    return Trials(
        "float32",
        rows=(1, 4, 16, 64, 256, 1024),
        elements=(1 << 13, 1 << 15, 1 << 17, 1 << 19, 1 << 21),
        copy_bytes=64 << 20,
        engines=((small, engines), (usual, engines + long), (wide, engines), (deep, (engines[1], engines[2], long[0]))),
        learners=((small, passes[:3]), (usual, passes + more), (wide, passes[1:4]), (deep, passes[1:3])),
    )


def on_accelerator() -> Trials:
    half = TrialModel(896, 4864, 4, 14, 2, 151_936)
    middle = TrialModel(2048, 8192, 4, 16, 4, 151_936, 128)
    large = TrialModel(3584, 18_944, 3, 28, 4, 151_936)
    mixture = TrialModel(2048, 768, 3, 16, 4, 151_936, 128, experts=64, experts_per_token=8)
    deep = TrialModel(896, 4864, 12, 14, 2, 32_000)
    few = (EngineTrial(16, 128, 24), EngineTrial(128, 512, 24), EngineTrial(512, 256, 24))
    many = (*few, EngineTrial(256, 1024, 16), EngineTrial(64, 2048, 16))
    passes = (LearnTrial(2, 8, 256, 240), LearnTrial(6, 8, 256, 256), LearnTrial(1, 8, 256, 1792))
    more = (
        LearnTrial(4, 8, 256, 256, {"share_prompts": False}),
        LearnTrial(6, 8, 256, 256, {"recompute": "full"}),
        LearnTrial(6, 8, 256, 256, {"lora_rank": 16}),
        LearnTrial(6, 8, 256, 256, {"fp8": "tensorwise"}),
    )
    return Trials(
        "bfloat16",
        rows=(1, 16, 64, 256, 512, 2048, 8192, 16384),
        elements=(1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28),
        copy_bytes=2 << 30,
        engines=((half, many), (middle, few), (large, few), (mixture, few), (deep, few[:2])),
        learners=((half, passes), (middle, passes + more), (large, passes[:2]), (mixture, passes[:2])),
    )


def tiny() -> Trials:
    """Of a test: everything once, in a second or two."""
    model = TrialModel(32, 64, 2, 2, 1, 50)
    other = TrialModel(48, 96, 3, 2, 1, 50)
    engines = (EngineTrial(2, 8, 4), EngineTrial(8, 8, 4))
    passes = (LearnTrial(1, 2, 8, 8), LearnTrial(2, 4, 8, 8))
    return Trials(
        "float32",
        (1, 16, 64),
        (1 << 12, 1 << 14),
        1 << 20,
        ((model, engines), (other, engines)),
        ((model, passes), (other, passes)),
    )
