"""Llama 2 and 3, SmolLM2 and what else says that it is one."""

from tidemill.models.families import Family

FAMILY = Family(name="llama", llama_form="Llama")
