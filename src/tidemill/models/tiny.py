"""Small decoders made on the spot: random weights and a tokenizer with one token per character."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tidemill.recipe.config import TinyModel

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CONFIGS: dict[str, Any] = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "llama": LlamaConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "mixtral": MixtralConfig,
}


def make_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *dict.fromkeys(alphabet)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_config(tiny: TinyModel, vocabulary: int) -> Any:
    return CONFIGS[tiny.architecture](
        vocab_size=vocabulary,
        hidden_size=tiny.hidden,
        intermediate_size=tiny.intermediate,
        num_hidden_layers=tiny.layers,
        num_attention_heads=tiny.heads,
        num_key_value_heads=tiny.kv_heads,
        head_dim=tiny.hidden // tiny.heads,
        max_position_embeddings=tiny.window,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        dtype=torch.float32,
        **_experts(tiny),
    )


def _experts(tiny: TinyModel) -> dict[str, Any]:
    match tiny.architecture:
        case "qwen3_moe":
            own: dict[str, Any] = {
                "num_experts": tiny.experts,
                "moe_intermediate_size": tiny.intermediate,
                "norm_topk_prob": True,
            }
        case "mixtral":
            own = {"num_local_experts": tiny.experts, "sliding_window": None}
        case _:
            return {}
    return {**own, "num_experts_per_tok": tiny.experts_per_token}
