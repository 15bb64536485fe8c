"""Tools by name: built in, or a user's own function by import path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from tidemill.environment.tools.api import FunctionTool, Tool, name_of
from tidemill.errors import ConfigError, did_you_mean
from tidemill.imports import built_in, is_import_path, load

BUILT_IN = {"calculator": "tidemill.environment.tools.calculator:calculator"}


def toolbox(functions: Sequence[str]) -> dict[str, Tool]:
    """The tools of one conversation, by the names that the model calls them."""
    found = [find(name) for name in functions]
    box = {name_of(tool): tool for tool in found}
    if len(box) < len(found):
        names = [name_of(tool) for tool in found]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"environment.args.functions: two tools are called {twice!r}", "rename one of the functions")
    return box


def find(name: str) -> Tool:
    if name in BUILT_IN:
        return FunctionTool(built_in(BUILT_IN[name]), name)
    if is_import_path(name):
        function: Callable[..., Any] = load(name, ConfigError, "environment.args.functions")
        if not callable(function) or not inspect.signature(function).parameters:
            raise ConfigError(f"environment.args.functions: {name!r} is no function that takes an argument")
        return FunctionTool(function, name.rpartition(":")[2])
    raise ConfigError(
        f"environment.args.functions: there is no tool {name!r}{did_you_mean(name, BUILT_IN)}",
        f"there are {', '.join(BUILT_IN)}; your own is package.module:function",
    )
