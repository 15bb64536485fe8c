"""Reward functions by name. `is_quick`: linear time and ours, so it runs in a thread here; others in workers."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidemill.errors import ConfigError, did_you_mean
from tidemill.imports import is_import_path, load
from tidemill.reward.api import RewardFunction


@dataclass(frozen=True, slots=True)
class BuiltIn:
    path: str  # module:function; imported when first used
    is_quick: bool


BUILT_IN: dict[str, BuiltIn] = {
    "exact": BuiltIn("tidemill.reward.answers:exact", True),
    "last_number": BuiltIn("tidemill.reward.answers:last_number", True),
    "numeric": BuiltIn("tidemill.reward.answers:numeric", True),
    "choice": BuiltIn("tidemill.reward.answers:choice", True),
    "math": BuiltIn("tidemill.reward.math_answers:math", False),
    "regex": BuiltIn("tidemill.reward.text:regex", False),  # a user's pattern can take for ever
    "json_schema": BuiltIn("tidemill.reward.text:json_schema", False),  # so can a pattern in a schema
    "format": BuiltIn("tidemill.reward.text:format", True),
    "length": BuiltIn("tidemill.reward.text:length", True),
    "stopped": BuiltIn("tidemill.reward.text:stopped", True),
    "repetition": BuiltIn("tidemill.reward.text:repetition", True),
    "countdown": BuiltIn("tidemill.reward.countdown:countdown", False),  # deep nesting costs the parser its stack
    "reasoning_gym": BuiltIn("tidemill.reward.gym:reasoning_gym", False),
    "code": BuiltIn("tidemill.reward.code:code", False),
    "environment": BuiltIn("tidemill.reward.played:environment", True),
    "judge": BuiltIn("tidemill.reward.judge:judge", False),
    "model": BuiltIn("tidemill.reward.model:model", False),
}


def is_quick(name: str) -> bool:
    return name in BUILT_IN and BUILT_IN[name].is_quick


def find(name: str) -> RewardFunction:
    """The function a recipe names; a name that does not exist is a ConfigError with the nearest ones."""
    if name in BUILT_IN:
        module, _, function = BUILT_IN[name].path.partition(":")
        found: RewardFunction = getattr(importlib.import_module(module), function)
        return found
    if is_import_path(name):
        found = load(name, ConfigError, "rewards")
        if not callable(found):
            raise ConfigError(f"rewards: {name!r} is no function but a {type(found).__name__}")
        return found
    raise ConfigError(
        f"rewards: there is no reward {name!r}{did_you_mean(name, BUILT_IN)}",
        f"the built-in rewards are {', '.join(BUILT_IN)}; your own is package.module:function",
    )


def check_args(name: str, function: RewardFunction, args: Mapping[str, Any]) -> None:
    """Arguments in the recipe that the function does not take, or needs and is not given."""
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters:
        raise ConfigError(f"rewards: {name!r} takes no argument; a reward function takes the sample first")
    keyword = {p.name: p for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for key in args:
            if key not in keyword:
                raise ConfigError(
                    f"rewards: {name!r} has no argument {key!r}{did_you_mean(key, keyword)}",
                    f"its arguments are {', '.join(keyword) or 'none'}",
                )
    for key, parameter in keyword.items():
        if parameter.default is parameter.empty and key not in args:
            raise ConfigError(
                f"rewards: {name!r} needs the argument {key!r}", f"set it in the reward's args: {{{key}: …}}"
            )
