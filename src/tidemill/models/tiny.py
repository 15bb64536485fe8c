"""Small decoders made on the spot: random weights and a tokenizer with one token per character."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from tidemill.models.shape import small_settings
from tidemill.models.vision.small import tokens_of
from tidemill.recipe.config import TinyModel

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def make_tokenizer(shape: TinyModel) -> PreTrainedTokenizerFast:
    for_images = tokens_of(shape.architecture)
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *dict.fromkeys(shape.alphabet), *for_images])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        **({"additional_special_tokens": list(for_images)} if for_images else {}),
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    if shape.chat_template is not None:
        made.chat_template = shape.chat_template
    return made


def make_config(tiny: TinyModel, vocabulary: int) -> Any:
    own: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    settings = small_settings(tiny, vocabulary, **own)
    return AutoConfig.for_model(**settings, dtype=torch.float32)
