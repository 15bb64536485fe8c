"""A served model in small: random weights, a byte-level tokenizer with the chat template of a family."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.chat.made import tokenizer as chat_tokenizer
from tidemill.run.serving import ModelServer, ServeOptions

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }
]


def model_folder(folder: Path, family: str = "qwen", seed: int = 0) -> Path:
    tokenizer = chat_tokenizer(family)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # so that some tokens are likelier than others
        model.lm_head.weight *= 30
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def served(folder: Path, **options: Any) -> Iterator[ModelServer]:
    server = ModelServer(ServeOptions(str(folder), name="tiny", device="cpu", port=0, **{"concurrent": 32, **options}))
    server.start()
    try:
        yield server
    finally:
        server.end()


def client(server: ModelServer, key: str = "") -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=server.http.address, headers=headers, timeout=60)
