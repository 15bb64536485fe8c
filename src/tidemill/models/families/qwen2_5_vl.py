"""Qwen2.5-VL: Qwen2 with rotary positions in time, height and width, and a tower of windows."""

from tidemill.models.families import Family

FAMILY = Family(name="qwen2_5_vl", llama_form="Qwen2_5_VL", has_bias=True)
