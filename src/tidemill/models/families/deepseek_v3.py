"""DeepSeek-V3: multi-head latent attention, one expert that every token visits beside the routed ones."""

from tidemill.models.families import Family

FAMILY = Family(
    name="deepseek_v3",
    latent_form="DeepseekV3",
    experts="n_routed_experts",
    small={
        "head_dim": 8,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
)
