"""What a recipe's program is: a function by import path, or a command."""

from __future__ import annotations

import importlib.util
import inspect
import shlex
import shutil

from tidemill.errors import ConfigError, MissingExtra
from tidemill.imports import is_import_path, load
from tidemill.recipe.config import EnvironmentSettings

KEY, EVALUATOR = "environment.program", "environment.evaluator"


def check(settings: EnvironmentSettings) -> None:
    """Refuse what could not be started, before a model is loaded."""
    assert settings.program is not None
    for package in ("starlette", "uvicorn", "msgspec"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(KEY, package, "serve")
    if is_import_path(settings.program):
        _check_call(KEY, settings.program, 3, dict(settings.args))
    else:
        words = shlex.split(settings.program)
        if not words or shutil.which(words[0]) is None:
            raise ConfigError(
                f"{KEY}: {settings.program!r} is no function, and there is no command {words[0] if words else ''!r}",
                "write file.py:function, package.module:function or a command with its arguments",
            )
        if settings.args:
            raise ConfigError("environment.args are for functions; a command has its own", f"put them into {KEY}")
    if settings.evaluator is not None:
        if not is_import_path(settings.evaluator):
            raise ConfigError(f"{EVALUATOR}: {settings.evaluator!r} is no function", "write package.module:function")
        _check_call(EVALUATOR, settings.evaluator, 2, {})


def _check_call(key: str, path: str, given: int, args: dict[str, object]) -> None:
    """`given`: arguments by place, in front of the recipe's own."""
    function = load(path, ConfigError, key)
    if not callable(function):
        raise ConfigError(f"{key}: {path!r} is no function", "name a function or a coroutine")
    try:
        inspect.signature(function).bind(*range(given), **args)
    except TypeError as error:
        wanted = "(base_url, api_key, task, **args)" if given == 3 else "(task, value)"
        said = f"{key}: {path} cannot be called with {wanted}: {error}"
        raise ConfigError(said, "write it as docs/agents.md shows") from None
