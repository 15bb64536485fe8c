"""Mixtral: Mistral with routed experts, as wide as its MLP would be."""

from tidemill.models.families import Family

FAMILY = Family(
    name="mixtral",
    llama_form="Mixtral",
    experts="num_local_experts",
    expert_width="intermediate_size",
    small={"sliding_window": None},
)
