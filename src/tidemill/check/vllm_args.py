"""Checks the arguments that a recipe hands on to vLLM, before vLLM is started: it takes a minute to refuse them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tidemill.check.sizes import unfit
from tidemill.recipe.config import Config, ModelSettings

KEY = "rollout.vllm.args"
# Arguments that Tidemill gives, and the setting that decides each; "": none does.
OURS = {
    "model": "model.path", "dtype": "model.dtype", "seed": "seed", "max_num_seqs": "rollout.concurrent",
    "max_model_len": "data.max_prompt_tokens and rollout.max_new_tokens",
    "gpu_memory_utilization": "rollout.vllm.memory_share", "enable_sleep_mode": "rollout.vllm.sleep_level",
    **dict.fromkeys(("load_format", "skip_tokenizer_init", "generation_config", "logprobs_mode"), ""),
    **dict.fromkeys(("worker_extension_cls", "disable_log_stats", "logits_processors"), ""),
}  # fmt: skip
SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def problems(config: Config, _: ModelSettings) -> Iterator[str]:
    args, rollout = config.rollout.vllm.args, config.rollout
    if args and rollout.engine != "vllm":
        yield unfit(KEY, args, f"rollout.engine is {rollout.engine}", "rollout.engine=vllm would do, or leave it out")
        return
    for name in sorted(args.keys() & OURS.keys()):
        setting = OURS[name]
        why, remedy = ("", f"use {setting}") if setting else (" so that it can load weights and score", "leave it out")
        yield f"{KEY} has {name}, which Tidemill sets{why}; {remedy}"
    sizes = {name: args[name] for name in SIZES if name in args}
    wrong = [name for name, size in sizes.items() if type(size) is not int or size < 1]
    for name in wrong:
        yield unfit(f"{KEY}.{name}", sizes[name], "it is a number of devices", "1 or more would do")
    if wrong or math.prod(sizes.values()) == 1:
        return
    said = ", ".join(f"{name} {size}" for name, size in sizes.items())
    if config.cluster.executor != "local":
        yield unfit(KEY, said, "each rollout worker has one device", "cluster.executor=local would do, or sizes of 1")
    if rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0:
        yield unfit(
            KEY, said, "the part that truncates and records kept mass works in one process",
            "rollout.top_p=1, rollout.top_k=0 and rollout.min_p=0 would do, or sizes of 1",
        )  # fmt: skip
