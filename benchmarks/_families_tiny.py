"""A tiny random model of every family of transformers' causal language models, made from its own config class.

Sizes are set by the words that config classes use for them; `CHANGES` has what a family needs besides, above all some
layers of every kind that it has.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tidemill.models.calling import plug
from tidemill.models.load import from_config
from tidemill.models.mixture import routing

VOCAB, LAYERS, WINDOW = 97, 4, 7
LARGEST = 5_000_000  # parameters; beyond this a size was not set
SCALE = 2.0  # of fresh matrices, which are so small that logits hardly differ


def _sizes(value: Any, words: str) -> dict[str, Any]:
    return dict.fromkeys(words.split(), value)


SIZES: dict[str, Any] = {
    **_sizes(VOCAB, "vocab_size vocab_size_per_layer_input"),
    **_sizes(32, "hidden_size d_model n_embd embedding_size emb_dim dim_model lru_width ple_embed_dim embedding_dim"),
    **_sizes(48, "intermediate_size ffn_hidden_size ffn_dim decoder_ffn_dim encoder_ffn_dim dff dim_ff n_inner"),
    **_sizes(48, "intermediate_size_mlp feed_forward_size prefix_dense_intermediate_size dense_intermediate_size"),
    **_sizes(LAYERS, "num_hidden_layers n_layer n_layers num_layers num_decoder_layers num_blocks"),
    **_sizes(LAYERS, "decoder_layers encoder_layers num_encoder_layers"),
    **_sizes(4, "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"),
    **_sizes(4, "attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads"),
    **_sizes(2, "num_key_value_heads swa_num_key_value_heads num_global_key_value_heads"),
    **_sizes(8, "head_dim dim_head v_head_dim kv_channels attention_head_dim swa_head_dim swa_v_head_dim"),
    **_sizes(8, "global_head_dim query_pre_attn_scalar qk_rope_head_dim qk_nope_head_dim"),
    **_sizes(256, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions model_max_length"),
    **_sizes(16, "q_lora_rank kv_lora_rank o_lora_rank index_head_dim index_n_heads moe_intermediate_size"),
    **_sizes(16, "shared_intermediate_size expert_ffn_hidden_size moe_latent_size moe_shared_expert_intermediate_size"),
    **_sizes(16, "shared_expert_intermediate_size pronunciation_embed_dim shape_embed_dim"),
    **_sizes(97, "pronunciation_vocab_size shape_vocab_size"),
    **_sizes(4, "n_routed_experts num_experts num_local_experts moe_num_experts rotary_dim laurel_rank"),
    **_sizes(2, "num_experts_per_tok num_experts_per_token moe_topk moe_k zero_expert_num"),
    **_sizes(1, "n_group topk_group num_expert_group mamba_n_groups mamba_ngroups num_groups n_groups"),
    **_sizes(8, "index_topk indexer_topk hidden_size_per_layer_input"),
    **_sizes(WINDOW, "sliding_window sliding_window_size local_attention attention_chunk_size window_size"),
    **_sizes(WINDOW, "attention_window_size attention_window"),
    **_sizes(4, "linear_num_value_heads linear_conv_kernel_dim mamba_dt_rank time_step_rank linear_num_heads"),
    **_sizes(2, "linear_num_key_heads n_mamba_heads"),
    **_sizes(8, "linear_key_head_dim linear_value_head_dim mamba_n_heads mamba_num_heads mamba_d_head"),
    **_sizes(8, "mamba_head_dim mamba_headdim mamba_d_state ssm_state_size state_size mamba_chunk_size chunk_size"),
    **_sizes(8, "linear_head_dim"),
    **_sizes(48, "d_inner"),
    **_sizes(64, "mamba_d_ssm position_bias_max_distance"),
    **_sizes(32, "position_bias_num_buckets"),
    **_sizes(0.0, "dropout attention_dropout hidden_dropout activation_dropout resid_pdrop embd_pdrop attn_pdrop"),
    **_sizes(0.0, "hidden_dropout_prob attention_probs_dropout_prob layerdrop encoder_layerdrop decoder_layerdrop"),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "is_decoder": True,
}

TOWER = {"image_size": 28, "patch_size": 14, "depth": 2, "num_position_embeddings": 16, "out_hidden_size": 32}
LATENT: dict[str, Any] = {"num_key_value_heads": 4, "qk_head_dim": 16, "head_dim": 8}
WITH_LATENT = (
    "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash",
    "minicpm3", "youtu",
)  # fmt: skip
MIXED = ["linear_attention", "full_attention"] * (LAYERS // 2)
CONVOLVED = ["conv", "full_attention"] * (LAYERS // 2)
GEMMA_LAYERS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 2
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(WITH_LATENT, LATENT),
    "bamba": {"attn_layer_indices": [1, 3]},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        "rope_parameters": ROPE,
    },
    "dots1": {"n_shared_experts": 1},
    "gemma3_text": {"layer_types": GEMMA_LAYERS},
    "gemma3n_text": {
        "num_hidden_layers": 8, "intermediate_size": 48, "layer_types": GEMMA_LAYERS * 2, "num_kv_shared_layers": 4,
        "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 6,
    },
    "gemma4_text": {"layer_types": GEMMA_LAYERS, "num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": MIXED},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**LATENT, "q_lora_rank": None, "layer_types": MIXED},
    "lfm2": {"layer_types": CONVOLVED},
    "lfm2_moe": {"layer_types": CONVOLVED},
    "mamba2": {"num_heads": 8},
    "minimax": {"layer_types": MIXED, "sliding_window": None},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp", "moe"]},
    "olmo_hybrid": {"layer_types": MIXED},
    "qwen3_next": {"layer_types": MIXED},
    "qwen3_5_text": {"layer_types": MIXED},
    "qwen3_5_moe_text": {"layer_types": MIXED},
    "qwen4_exp_text": {"layer_types": ["linear_attention", "qwen_sparse_attention"] * 2, **INDEXER},
    "reformer": {"axial_pos_embds_dim": [8, 24], "axial_pos_shape": [16, 16]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 7, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "mamba_headdim": 8, "n_mamba_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def families() -> list[str]:
    """Every `model_type` that transformers opens as a causal language model."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def class_name(family: str) -> str:
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])


class Unmade(Exception):
    """No tiny model of a family could be made here."""


@cache
def _fields(kind: Any) -> frozenset[str]:
    if dataclasses.is_dataclass(kind):
        return frozenset(field.name for field in dataclasses.fields(kind))
    return frozenset(inspect.signature(kind.__init__).parameters)


def config(family: str) -> Any:
    """The family's config at tiny sizes."""
    kind = CONFIG_MAPPING[family]
    changes = CHANGES.get(family, {})
    given = {word: size for word, size in SIZES.items() if word in _fields(kind)}
    for part, own in kind.sub_configs.items():
        if part in _fields(kind) and "model_type" in vars(own):
            given[part] = _part(own)
    return kind(**{**given, **changes})


def _part(kind: Any) -> dict[str, Any]:
    """A config inside another one, a tower's too."""
    sizes = {word: size for word, size in {**SIZES, **TOWER}.items() if word in _fields(kind)}
    return sizes | CHANGES.get(kind.model_type, {})


def models(family: str, seed: int = 0, **changes: Any) -> tuple[Any, Any]:
    """A model as Tidemill opens it, and the same as transformers alone does. `changes`: to its config."""
    try:
        settings, ours_too, theirs_too = (_changed(config(family), changes) for _ in range(3))
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(settings).parameters())
        if size > LARGEST:
            raise Unmade(f"its config has sizes by words that are not known ({size:,} parameters)")
        torch.manual_seed(seed)
        ours = from_config(ours_too).eval()
        theirs = AutoModelForCausalLM.from_config(theirs_too, attn_implementation="eager").eval()
    except Unmade:
        raise
    except Exception as error:
        raise Unmade(f"{type(error).__name__}: {_line(error)}") from error
    with torch.no_grad():
        for p in ours.parameters():
            if p.dim() > 1:
                p.mul_(SCALE)
    theirs.load_state_dict(ours.state_dict())
    plug(ours)
    routing.widen(ours)
    return ours, theirs


def _changed(settings: Any, changes: dict[str, Any]) -> Any:
    for name, value in changes.items():
        setattr(settings, name, value)
    return settings


def _line(error: Exception) -> str:
    text = re.sub(r"\s+", " ", str(error)).strip()
    return text[:160]
