"""LLaVA: Llama (or another decoder) behind a CLIP tower."""

from tidemill.models.families import Family

FAMILY = Family(name="llava", decoder="llama")
