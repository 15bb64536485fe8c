"""Qwen3: Llama with normed queries and keys."""

from tidemill.models.families import Family

FAMILY = Family(name="qwen3", llama_form="Qwen3", has_head_norms=True)
