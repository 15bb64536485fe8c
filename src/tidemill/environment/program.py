"""What a recipe's program is: a function by import path, or a command."""

from __future__ import annotations

import importlib.util
import shlex
import shutil

from tidemill.environment.interpreter import check_call, check_calls
from tidemill.errors import ConfigError, MissingExtra
from tidemill.imports import is_import_path
from tidemill.recipe.config import EnvironmentSettings

KEY, EVALUATOR = "environment.program", "environment.evaluator"


def check(settings: EnvironmentSettings) -> None:
    """Refuse what could not be started, before a model is loaded."""
    assert settings.program is not None
    for package in ("starlette", "uvicorn", "msgspec"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(KEY, package, "serve")
    calls = []
    if is_import_path(settings.program):
        calls.append((KEY, settings.program, 3, settings.args))
    else:
        words = shlex.split(settings.program)
        if not words or shutil.which(words[0]) is None:
            raise ConfigError(
                f"{KEY}: {settings.program!r} is no function, and there is no command {words[0] if words else ''!r}",
                "write file.py:function, package.module:function or a command with its arguments",
            )
        if settings.python is not None:
            raise ConfigError("environment.python is for functions", f"write the interpreter into {KEY}")
        if settings.args:
            raise ConfigError("environment.args are for functions; a command has its own", f"put them into {KEY}")
    if settings.evaluator is not None:
        if not is_import_path(settings.evaluator):
            raise ConfigError(f"{EVALUATOR}: {settings.evaluator!r} is no function", "write package.module:function")
        calls.append((EVALUATOR, settings.evaluator, 2, {}))
    if settings.python is not None:
        check_calls(settings.python, calls)
    else:
        for call in calls:
            check_call(*call)
