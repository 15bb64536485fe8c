"""The stages that algorithms share, as table rows. Columns of tokens are jagged over the response unless noted."""

from __future__ import annotations

import json

import numpy as np

from tidemill.batch import GROUP, ID, LENGTH, VERSION, Batch
from tidemill.config import Config
from tidemill.graph import Stage

# What each row has when it enters: prompt tokens (int32, jagged) and the text columns of its example.
SOURCE = (ID, GROUP, "prompt", "answer", "meta", "where")


def rollout() -> Stage:
    """tokens: prompt and response. mask: 1 where the model made the token. finish: index into FINISH."""
    writes = ("tokens", "prompt_length", "logprobs", "versions", "mask", "finish", VERSION, LENGTH)
    return Stage("rollout", "rollout", (ID, GROUP, "prompt"), writes, "group")


def reward() -> Stage:
    """parts: a JSON object of each reward function's own value, as text."""
    reads = (ID, GROUP, "tokens", "prompt_length", "versions", "finish", "answer", "meta", "where")
    return Stage("reward", "reward", reads, ("reward", "correct", "parts"))


def policy_logprobs(config: Config) -> tuple[Stage, ...]:
    """Columns that only some settings need: recomputed old log-probabilities, the reference's."""
    settings = config.algorithm
    reads = (GROUP, "tokens", "prompt_length", LENGTH)
    stages = []
    if settings.old_logprobs == "recompute":
        stages.append(Stage("old_logprobs", "actor", reads, ("old_logprobs",)))
    if settings.kl.coef > 0:
        stages.append(Stage("reference", "reference", reads, ("ref_logprobs",)))
    return tuple(stages)


def advantage(config: Config, *more: str) -> Stage:
    reads: tuple[str, ...] = (GROUP, "reward", "mask", *more)
    if config.algorithm.kl.coef > 0 and config.algorithm.kl.place == "reward":
        reads += (old_column(config), "ref_logprobs")
    return Stage("advantage", "reward", tuple(dict.fromkeys(reads)), ("advantages",), "group")


def learn(config: Config, *more: str) -> Stage:
    reads: tuple[str, ...] = (
        ID,
        GROUP,
        LENGTH,
        "tokens",
        "prompt_length",
        "mask",
        "logprobs",
        "versions",
        "advantages",
        *more,
    )
    if config.algorithm.old_logprobs == "recompute":
        reads += ("old_logprobs",)
    if config.algorithm.kl.coef > 0:
        reads += ("ref_logprobs",)
    return Stage("learn", "actor", reads, scope="group")


def old_column(config: Config) -> str:
    return "old_logprobs" if config.algorithm.old_logprobs == "recompute" else "logprobs"


def part(batch: Batch, name: str) -> np.ndarray:
    """One reward component of every row, out of the column `parts`."""
    return np.array([json.loads(text).get(name, 0.0) for text in batch["parts"]], np.float32)
