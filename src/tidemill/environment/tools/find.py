"""Tools by name: built in, a user's own by import path, or those of an MCP server."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.environment.tools.api import FunctionTool, Tool, name_of
from tidemill.errors import ConfigError, did_you_mean
from tidemill.imports import built_in, check_arguments, is_import_path, load

KEY = "environment.args.functions"
FUNCTIONS = {"calculator": "tidemill.environment.tools.calculator:calculator"}
MAKERS = {  # (**settings) -> the tools of one conversation
    "python": "tidemill.environment.tools.python:tools",
    "search": "tidemill.environment.tools.search:tools",
    "mcp": "tidemill.environment.tools.mcp:tools",
}
BUILT_IN = (*FUNCTIONS, *MAKERS)

Entry = str | Mapping[str, Any]  # a name, or {name: {setting: value}}


def toolbox(functions: Sequence[Entry]) -> dict[str, Tool]:
    """The tools of one conversation, by the names that the model calls them."""
    found = [tool for entry in functions for tool in find(entry)]
    box = {name_of(tool): tool for tool in found}
    if len(box) < len(found):
        names = [name_of(tool) for tool in found]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{KEY}: two tools are called {twice!r}", "rename one of them")
    return box


def find(entry: Entry) -> list[Tool]:
    name, settings = _read(entry)
    if name in MAKERS:
        make = built_in(MAKERS[name])
        _check(name, make, settings)
        made: list[Tool] = make(**settings)
        return made
    if name in FUNCTIONS or (is_import_path(name) and not settings):
        return [_of(name, built_in(FUNCTIONS[name]) if name in FUNCTIONS else load(name, ConfigError, KEY))]
    if is_import_path(name):
        return [_stateful(name, load(name, ConfigError, KEY), settings)]
    raise ConfigError(
        f"{KEY}: there is no tool {name!r}{did_you_mean(name, BUILT_IN)}",
        f"there are {', '.join(BUILT_IN)}; your own is package.module:function",
    )


def _read(entry: Entry) -> tuple[str, dict[str, Any]]:
    if isinstance(entry, str):
        return entry, {}
    if isinstance(entry, Mapping) and len(entry) == 1:
        [(name, settings)] = entry.items()
        if isinstance(settings, Mapping) or settings is None:
            return str(name), dict(settings or {})
    raise ConfigError(f"{KEY}: {entry!r} is no tool", "write a name, or {name: {setting: value}}")


def _of(name: str, thing: Any) -> Tool:
    """A function, or a class whose objects are tools."""
    if isinstance(thing, type):
        return _stateful(name, thing, {})
    if not callable(thing) or not inspect.signature(thing).parameters:
        raise ConfigError(f"{KEY}: {name!r} is no function that takes an argument")
    return FunctionTool(thing, name.rpartition(":")[2])


def _stateful(name: str, kind: Any, settings: Mapping[str, Any]) -> Tool:
    if not isinstance(kind, type):
        raise ConfigError(f"{KEY}: {name!r} is a function, which has no settings", "make it a class, or leave them out")
    _check(name, kind, settings)
    made = kind(**settings)
    if not callable(getattr(made, "call", None)) or not isinstance(getattr(made, "schema", None), Mapping):
        raise ConfigError(
            f"{KEY}: a {name!r} is no tool", "it needs `schema` and `call(arguments)`: docs/environments.md"
        )
    tool: Tool = made
    return tool


def _check(name: str, make: Any, settings: Mapping[str, Any]) -> None:
    def given(_: Any, /, *args: Any, **kwargs: Any) -> None: ...

    parameters = inspect.signature(make).parameters.values()
    first = inspect.Parameter("_", inspect.Parameter.POSITIONAL_ONLY)
    given.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]  # nothing comes first
    check_arguments(f"tool {name!r}", given, settings, ConfigError)
