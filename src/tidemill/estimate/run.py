"""What a run's batch settings come to, worked out from them alone: samples, tokens, cache, checkpoints."""

from __future__ import annotations

import math

from tidemill.recipe.config import Config

BYTES = {"float32": 4, "bfloat16": 2}


def longest(config: Config) -> int:
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def samples_per_step(config: Config) -> int:
    return config.train.prompts_per_step * config.train.samples_per_prompt


def tokens_per_step(config: Config) -> int:
    return samples_per_step(config) * longest(config)


def microbatch_tokens(config: Config) -> tuple[int, int]:
    """(tokens computed, response tokens among them) of the largest micro-batch, when every sample is as long as it may
    be. Samples, or groups that share their prompt, are not cut, so a micro-batch is seldom full."""
    budget, samples = config.train.tokens_per_microbatch, samples_per_step(config)
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    each = config.train.samples_per_prompt if config.shares_prompts else 1
    each = min(each, max(1, (budget - prompt) // response))
    unit, units = prompt + each * response, math.ceil(samples / each)
    bins = math.ceil(units / max(1, budget // unit))
    most = math.ceil(units / bins)
    return most * unit, most * each * response


def tokens_computed(config: Config) -> int:
    """Of one update at most: a group's prompt counts once where it is shared."""
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    each = config.train.samples_per_prompt
    prompts = 1 if config.shares_prompts else each
    return config.train.prompts_per_step * (prompts * prompt + each * response) // config.train.updates_per_step


def cache_tokens(config: Config) -> int:
    if config.rollout.cache_tokens is not None:
        return config.rollout.cache_tokens
    page = config.rollout.page_size or 32  # the largest that an engine chooses by itself
    at_once = min(config.rollout.concurrent, max(samples_per_step(config), config.eval.size))
    return at_once * math.ceil(longest(config) / page) * page


def checkpoints_kept(config: Config) -> int:
    return config.checkpoint.keep + 1
