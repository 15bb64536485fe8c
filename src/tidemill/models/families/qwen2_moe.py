"""Qwen2-MoE: Qwen2 with routed experts and one that every token visits."""

from tidemill.models.families import Family

FAMILY = Family(
    name="qwen2_moe",
    llama_form="Qwen2Moe",
    has_bias=True,
    experts="num_experts",
    shared_width="shared_expert_intermediate_size",
)
