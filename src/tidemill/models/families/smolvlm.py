"""SmolVLM and SmolVLM2: Llama behind a SigLIP tower."""

from tidemill.models.families import Family

FAMILY = Family(name="smolvlm", decoder="llama")
