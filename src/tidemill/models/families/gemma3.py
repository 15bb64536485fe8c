"""Gemma 3: normed queries and keys, a tied output layer."""

from tidemill.models.families import Family

FAMILY = Family(name="gemma3", has_head_norms=True, is_tied=True)
