"""Checks of numbers that must divide or fit one another, each with one sentence: the value, the limit, what would
do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tidemill.errors import either
from tidemill.estimate.run import longest
from tidemill.models.shape import ModelShape
from tidemill.recipe.config import Config


def undivided(key: str, value: int, what: str, fit: Sequence[int] | str) -> str:
    would = fit if isinstance(fit, str) else f"{either(fit)} would do"
    return f"{key} is {value}, which does not divide {what}; {would}"


def unfit(key: str, value: object, what: str, remedy: str) -> str:
    return f"{key} is {value}, but {what}; {remedy}"


def longest_in_words(config: Config) -> str:
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    return f"data.max_prompt_tokens ({prompt}) + rollout.max_new_tokens ({response}) = {longest(config)}"


def window_problems(config: Config, whose: str, shape: ModelShape | None) -> Iterator[str]:
    """Check the window of a model that reads whole samples."""
    if shape is None or shape.window is None or shape.window >= longest(config):
        return
    room = shape.window - config.rollout.max_new_tokens
    fix = f"data.max_prompt_tokens={room} would do" if room > 0 else "lower rollout.max_new_tokens"
    yield f"{whose} {shape.window} tokens, less than a sample may have: {longest_in_words(config)}; {fix}"
