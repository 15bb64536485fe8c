"""Qwen3-MoE: Qwen3 with routed experts."""

from tidemill.models.families import Family

FAMILY = Family(
    name="qwen3_moe",
    llama_form="Qwen3Moe",
    has_head_norms=True,
    experts="num_experts",
    small={"norm_topk_prob": True},
)
