"""Checks the arguments that a recipe hands on to vLLM, before vLLM is started: it takes a minute to refuse them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tidemill import device
from tidemill.check.sizes import unfit
from tidemill.models.shape import shape_of
from tidemill.recipe.config import Config, ModelSettings

KEY = "rollout.vllm.args"
# Arguments that Tidemill gives, and the setting that decides each; "": none does.
OURS = {
    "model": "model.path", "dtype": "model.dtype", "seed": "seed", "max_num_seqs": "rollout.concurrent",
    "max_model_len": "data.max_prompt_tokens and rollout.max_new_tokens",
    "gpu_memory_utilization": "rollout.vllm.memory_share", "enable_sleep_mode": "rollout.vllm.sleep_level",
    **dict.fromkeys(("load_format", "skip_tokenizer_init", "generation_config", "logprobs_mode"), ""),
    **dict.fromkeys(("worker_extension_cls", "disable_log_stats", "logits_processors", "max_loras"), ""),
    "max_lora_rank": "learn.lora_rank", "lora_target_modules": "learn.lora_modules",
}  # fmt: skip
SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def problems(config: Config, model: ModelSettings) -> Iterator[str]:
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
    if args.get("enable_lora") and not config.learn.lora_rank:
        yield unfit(f"{KEY}.enable_lora", True, "nothing has adapters", "learn.lora_rank=16 would do, or leave it out")
    if not wrong:
        yield from _replicas(sizes.get("data_parallel_size", 1), config, model)
        yield from _experts(sizes.get("tensor_parallel_size", 1), config, model)
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


def _replicas(count: int, config: Config, model: ModelSettings) -> Iterator[str]:
    """vLLM's own replicas: it refuses them to the engine that works in a process of ours, and waits for ever where that
    is got round."""
    if count == 1:
        return
    shape = shape_of(model)
    ours = f"cluster.rollouts={count} with cluster.executor=processes|ray and cluster.placement.rollout=separated"
    experts = f" (experts shared: tensor_parallel_size {count} with enable_expert_parallel true)"
    remedy = f"{ours} makes as many engines{experts if shape is not None and shape.experts else ''}"
    what = "vLLM gives each replica a process with a program of its own, and here one program drives the engine"
    yield unfit(f"{KEY}.data_parallel_size", count, what, remedy)


def _experts(workers: int, config: Config, model: ModelSettings) -> Iterator[str]:
    """Experts of a mixture spread over an engine's workers."""
    if not config.rollout.vllm.args.get("enable_expert_parallel"):
        return
    key, shape = f"{KEY}.enable_expert_parallel", shape_of(model)
    if shape is not None and not shape.experts:
        yield unfit(key, True, "the model has no experts", "leave it out")
    elif workers == 1:
        yield unfit(
            key, True, "one worker holds all experts", f"{KEY}.tensor_parallel_size=2 would do, or leave it out"
        )
    elif config.device == "cpu" or (config.device == "auto" and device.pick().kind == "cpu"):
        what = "vLLM's kernel of experts on a CPU takes no part of them (it ends with a memory fault)"
        yield unfit(
            key, True, what, "an accelerator would do, or leave it out: tensor parallel workers cut each expert"
        )
