"""Environments by name: built in, of an installed package of games, or a user's own by import path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from tidemill.environment.api import Maker
from tidemill.errors import ConfigError, did_you_mean
from tidemill.imports import is_import_path, load

BUILT_IN = {
    "nim": "tidemill.environment.nim:Nim",
    "tools": "tidemill.environment.tools:Tools",
}
PACKAGES = {  # PREFIX:GAME
    "gymnasium": "tidemill.environment.gymnasium:maker",
    "textarena": "tidemill.environment.textarena:maker",
}


def find(name: str) -> Maker:
    """The class a recipe names; a name that does not exist is a ConfigError with the nearest ones."""
    package, _, game = name.partition(":")
    if name in BUILT_IN:
        return _at(BUILT_IN[name])  # type: ignore[no-any-return]
    if package in PACKAGES and game:
        return _at(PACKAGES[package])(game)  # type: ignore[no-any-return]
    if is_import_path(name):
        found: Maker = load(name, ConfigError, "environment.name")
        return found
    raise ConfigError(
        f"environment.name: there is no environment {name!r}{did_you_mean(name, BUILT_IN)}",
        f"there are {', '.join([*BUILT_IN, *(f'{p}:GAME' for p in PACKAGES)])}; your own is package.module:Class",
    )


def check_args(name: str, maker: Maker, args: Mapping[str, Any]) -> None:
    """Arguments in the recipe that the environment does not take."""
    parameters = inspect.signature(maker).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    known = list(parameters)[1:]
    for key in args:
        if key not in known:
            raise ConfigError(
                f"environment {name!r} has no argument {key!r}{did_you_mean(key, known)}",
                f"its arguments are {', '.join(known) or 'none'}",
            )


def _at(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
