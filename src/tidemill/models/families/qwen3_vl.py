"""Qwen3-VL: Qwen3 with rotary positions in time, height and width; its tower speaks to the first layers too."""

from tidemill.models.families import Family

FAMILY = Family(name="qwen3_vl", llama_form="Qwen3VLText", has_head_norms=True)
