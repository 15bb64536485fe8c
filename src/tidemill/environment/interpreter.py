"""Our code in another Python: an agent or an environment may need packages that conflict with ours.

Of our packages that interpreter sees `tidemill` alone, and what runs there must need nothing but Python itself.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tidemill.errors import ConfigError
from tidemill.imports import load

CHECK_S = 120.0  # an agent framework's import can take long on a crowded machine
PACKAGE = Path(__file__).resolve().parents[1]
BEGIN = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("tidemill", {init!r}, submodule_search_locations=[{folder!r}])
sys.modules["tidemill"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
sys.path.append({here!r})
import {module} as module
module.{call}
"""


def command(python: str | None, module: str, call: str) -> list[str]:
    """The command that makes a call of one of our modules. `python`: none, this interpreter."""
    folder = str(PACKAGE)
    begin = BEGIN.format(init=f"{folder}/__init__.py", folder=folder, here=os.getcwd(), module=module, call=call)
    return [_found(python) if python else sys.executable, "-c", begin]


def _found(python: str) -> str:
    found = shutil.which(os.path.expanduser(python))
    if found is None:
        raise ConfigError(
            f"environment.python: there is no interpreter {python!r}", "name one, such as .venv/bin/python"
        )
    return found


def check_calls(python: str, calls: Sequence[tuple[str, str, int, Mapping[str, Any]]]) -> None:
    """Refuse functions that the other interpreter cannot import or call: key, path, arguments by place and by name."""
    told = json.dumps([[key, path, given, dict(args)] for key, path, given, args in calls])
    asked = command(python, __name__, f"answer({told!r})")
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=CHECK_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"environment.python: {python} could not be asked: {error}") from error
    answer = _read(done.stdout)
    if answer is None:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(
            f"environment.python: {python} cannot run Tidemill's side: {last}", "use Python 3.11 or newer"
        )
    if answer:
        raise ConfigError(answer[0], answer[1])


def _read(said: str) -> list[str] | None:
    try:
        found = json.loads(said.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return found if isinstance(found, list) else None


# In the other interpreter


def answer(told: str) -> None:
    """Print what is wrong with the functions, and the remedy, as JSON; an empty list where nothing is."""
    wrong: list[str] = []
    try:
        for key, path, given, args in json.loads(told):
            check_call(key, path, given, args)
    except ConfigError as error:
        wrong = [error.message, error.remedy or ""]
    print(json.dumps(wrong))


def check_call(key: str, path: str, given: int, args: Mapping[str, Any]) -> None:
    """Refuse what is no function, or cannot be called so. `given`: arguments by place, in front of the recipe's own."""
    function = load(path, ConfigError, key)
    if not callable(function):
        raise ConfigError(f"{key}: {path!r} is no function", "name a function or a coroutine")
    try:
        inspect.signature(function).bind(*range(given), **args)
    except TypeError as error:
        wanted = "(base_url, api_key, task, **args)" if given == 3 else "(task, value)"
        said = f"{key}: {path} cannot be called with {wanted}: {error}"
        raise ConfigError(said, "write it as docs/agents.md shows") from None
