"""Tiny random models of every architecture that the docs name, and a loop that runs requests to their end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

import tidemill.models.attention.registry  # noqa: F401  registers the attention
from tidemill.batch import Batch, Column
from tidemill.rollout.engine import Completion, Request, RolloutEngine

VOCAB = 97
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

# name: (config class, changes to the base)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama3-rope": ("LlamaConfig", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 9}),
    "gemma2": ("Gemma2Config", {"sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 8, "query_pre_attn_scalar": 8, "num_hidden_layers": 6}),
    "phi": ("PhiConfig", {}),
    "phi3": ("Phi3Config", {"sliding_window": 9}),
    "qwen3-moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "qwen3-moe-mixed": ("Qwen3MoeConfig", {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [1],
        "norm_topk_prob": True}),
    "qwen2-moe": ("Qwen2MoeConfig", {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 1}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": None}),
    "mixtral-window": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": 9}),
    "deepseek-v3": ("DeepseekV3Config", {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
        "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {"logits_scaling": 2.0, "attention_multiplier": 0.3}),
    "cohere2": ("Cohere2Config", {"sliding_window": 8}),
    "smollm3": ("SmolLM3Config", {}),
    "glm4": ("Glm4Config", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": None}),
    "gpt-oss": ("GptOssConfig", {
        "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
}  # fmt: skip


def tiny_model(name: str, seed: int = 0) -> torch.nn.Module:
    kind, changes = MODELS[name]
    options = {**_BASE, **changes}
    config = getattr(transformers, kind)(**options)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="tidemill")
    with torch.no_grad():  # fresh weights are so small that logits hardly differ
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model.eval()


def kept_chances(p: np.ndarray, cut: dict[str, Any]) -> np.ndarray:
    """The chances that are left of `p` when it is truncated, as a distribution."""
    order = np.argsort(-p)
    q = p[order].copy()
    q[int(cut.get("top_k", len(q))) :] = 0
    q[(np.cumsum(q) - q) >= cut.get("top_p", 2.0) * q.sum()] = 0
    q[q < cut.get("min_p", 0.0) * q[0]] = 0
    kept = np.zeros_like(p)
    kept[order] = q / q.sum()
    return kept


def as_batch(done: list[Completion]) -> Batch:
    """Samples as the learner gets them."""
    return Batch(
        {
            "id": np.arange(len(done)),
            "group": np.array([completion.request.id for completion in done]),
            "tokens": Column.jagged([[*c.request.prompt, *c.tokens] for c in done], np.int32),
            "prompt_length": np.array([len(c.request.prompt) for c in done], np.int32),
        }
    )


def roll(engine: RolloutEngine, requests: Iterable[Request]) -> dict[tuple[int, int], Completion]:
    for request in requests:
        engine.submit(request)
    done: dict[tuple[int, int], Completion] = {}
    while engine.has_work:
        for completion in engine.step():
            done[completion.request.id, completion.index] = completion
    return done
