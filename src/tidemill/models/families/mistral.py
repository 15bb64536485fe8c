"""Mistral: Llama with a window on all layers."""

from tidemill.models.families import Family

FAMILY = Family(name="mistral", llama_form="Mistral")
