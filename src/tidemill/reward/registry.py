"""Reward functions by name. `is_quick`: linear time and ours, so it runs in a thread here; others in workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidemill.errors import ConfigError, did_you_mean
from tidemill.imports import built_in, check_arguments, is_import_path, load
from tidemill.reward.api import RewardFunction


@dataclass(frozen=True, slots=True)
class BuiltIn:
    path: str  # module:function; imported when first used
    is_quick: bool
    wants_device: bool = False  # is told the run's device


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
    "model": BuiltIn("tidemill.reward.model:model", False, wants_device=True),
}


def is_quick(name: str) -> bool:
    return name in BUILT_IN and BUILT_IN[name].is_quick


def wants_device(name: str) -> bool:
    return name in BUILT_IN and BUILT_IN[name].wants_device


def find(name: str) -> RewardFunction:
    """The function a recipe names; a name that does not exist is a ConfigError with the nearest ones."""
    if name in BUILT_IN:
        found: RewardFunction = built_in(BUILT_IN[name].path)
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
    check_arguments(f"rewards: {name!r}", function, args, ConfigError)
