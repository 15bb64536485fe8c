"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values."""

from tidemill.models.families import Family

FAMILY = Family(name="qwen2", llama_form="Qwen2", has_bias=True)
