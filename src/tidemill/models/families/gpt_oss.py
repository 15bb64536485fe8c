"""GPT-OSS: attention with sinks and windows, routed experts with biases and a bounded gate."""

from tidemill.models.families import Family

FAMILY = Family(
    name="gpt_oss",
    llama_form="GptOss",
    has_bias=True,
    experts="num_local_experts",
    expert_width="intermediate_size",
    small={"sliding_window": 32},
)
