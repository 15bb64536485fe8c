"""Idefics3: Llama behind a SigLIP tower."""

from tidemill.models.families import Family

FAMILY = Family(name="idefics3", decoder="llama")
