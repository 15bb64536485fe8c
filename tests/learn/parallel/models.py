"""Small models and batches for cases across ranks: dense and mixtures, tied and untied, few key heads."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.distributed.distributed_c10d import _get_default_store
from transformers import AutoModelForCausalLM

import tidemill.learn.engine  # noqa: F401  imported once, before ranks are forked
from tests.learn.grouped import grouped
from tidemill.batch import Batch
from tidemill.learn.parallel.collectives import MeshLink, world
from tidemill.learn.parallel.flight import Flight
from tidemill.recipe.config import Config

VOCABULARY = 96
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
_MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", {}),
    "qwen3-untied": ("Qwen3Config", {"tie_word_embeddings": False}),
    "llama-4kv": ("LlamaConfig", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "gemma2": ("Gemma2Config", {"sliding_window": 8, "query_pre_attn_scalar": 8}),
    "qwen3-moe": ("Qwen3MoeConfig", {**_MIXTURE, "tie_word_embeddings": False}),
    "qwen3-moe-tied": ("Qwen3MoeConfig", _MIXTURE),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "sliding_window": None, "tie_word_embeddings": False}),
    "deepseek-v3": ("DeepseekV3Config", {
        "num_key_value_heads": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 2,
        "moe_intermediate_size": 24, "first_k_dense_replace": 0, "n_shared_experts": 1}),
}  # fmt: skip


def model(name: str, seed: int = 0, **changes: Any) -> Any:
    kind, own = MODELS[name]
    config = getattr(transformers, kind)(**{**_BASE, **own, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = AutoModelForCausalLM.from_config(config, attn_implementation="tidemill")
    with torch.no_grad():
        for parameter in made.parameters():  # fresh weights are so small that no token differs from another
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return made.eval()


def samples(seed: int = 0, groups: int = 3, each: int = 3, longest: int = 20) -> Batch:
    return grouped(np.random.default_rng(seed), groups, each, longest=longest, words=VOCABULARY)


def config(**over: Any) -> Config:
    return Config.model_validate({"algorithm": "grpo", "train": {"tokens_per_microbatch": 4096}, **over})


def over_all() -> MeshLink:
    """All ranks of the world."""
    return world(Flight(_get_default_store(), dist.get_rank(), 60.0))


def gradients(made: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}
