"""Functions and classes that a recipe names: by import path (`package.module:function` or `path/to/file.py:function`),
and whether they take the arguments that the recipe has for them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.errors import TidemillError, did_you_mean


class _Lazy:
    """A module that is imported when it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, found)
        return found


if TYPE_CHECKING:
    import torch as torch
else:
    torch = _Lazy("torch")  # importing it takes seconds, which reading a recipe does not have
FIX = "fix the module, so that Python can import it"
HERE = "python"  # in place of a module: an object that was handed over in this process
WORKER = "TIDEMILL_WORKER"  # in the environment of a worker and of what it starts
_kept: dict[str, Any] = {}
PATH = re.compile(r"(?P<module>[A-Za-z_][\w.]*|.+\.py):(?P<name>[A-Za-z_]\w*)")


def is_import_path(text: str) -> bool:
    return PATH.fullmatch(text) is not None


def keep(path: str, thing: Any) -> None:
    """Let `load` find an object of this process by `python:NAME`."""
    _kept[path] = thing


def is_kept_here(path: str) -> bool:
    return path.startswith(f"{HERE}:")


def refuse_in_worker() -> None:
    """A program that trains at its top level would train again in every worker that imports a function from it."""
    if name := os.environ.get(WORKER):
        raise TidemillError(
            f"{name} imports a function from a program that trains when it is imported",
            'put the training under `if __name__ == "__main__":`, or the function into a file of its own',
        )


def _of_here(path: str, error: type[TidemillError], key: str) -> Any:
    if path not in _kept:
        raise error(
            f"{key}: {path.partition(':')[2]!r} was handed over as a Python object, which only that process has",
            "go on with Trainer.from_run(RUN, rewards=…) and give it again, or move it to a file that can be imported",
        )
    return _kept[path]


def built_in(path: str) -> Any:
    """One of our own, by module:name; imported when first used."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def named(package: str, name: str) -> Any:
    """The class in the package's file of that name whose `name` it is; None when there is none."""
    if not name.isidentifier() or importlib.util.find_spec(f"{package}.{name}") is None:
        return None
    module = importlib.import_module(f"{package}.{name}")
    return next((v for v in vars(module).values() if isinstance(v, type) and vars(v).get("name") == name), None)


def files_of(package: str) -> list[str]:
    """The modules of a package, by their names; a file that is added is found."""
    return [m.name for m in pkgutil.iter_modules(importlib.import_module(package).__path__) if not m.ispkg]


def check_arguments(
    called: str, function: Callable[..., Any], args: Mapping[str, Any], error: type[TidemillError]
) -> None:
    """Arguments in the recipe that a function does not take behind its first one, or needs and is not given."""
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters:
        raise error(f"{called} takes no argument; it is given one thing to work on first")
    known = {p.name: p for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key in args:
        if key not in known and not takes_any:
            remedy = f"its arguments are {', '.join(known) or 'none'}"
            raise error(f"{called} has no argument {key!r}{did_you_mean(key, known)}", f"use another: {remedy}")
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in args:
            raise error(f"{called} needs the argument {key!r}", f"set it in its args: {{{key}: …}}")


def load(path: str, error: type[TidemillError], key: str) -> Any:
    """The object at an import path. What goes wrong is raised as `error`, naming the recipe's `key`."""
    match = PATH.fullmatch(path)
    if match is None:
        raise error(
            f"{key}: {path!r} is not an import path", "write package.module:function or path/to/file.py:function"
        )
    module_name, name = match["module"], match["name"]
    if module_name == HERE:
        return _of_here(path, error, key)
    module = load_file(path, module_name, error, key) if module_name.endswith(".py") else None
    module = module or load_module(path, module_name, error, key)
    if not hasattr(module, name):
        names = [n for n in vars(module) if not n.startswith("_")]
        raise error(
            f"{key}: {module_name} has no {name!r}{did_you_mean(name, names)}",
            f"name something that it has: {', '.join(names[:8]) or 'nothing yet'}",
        )
    return getattr(module, name)


def load_module(path: str, module_name: str, error: type[TidemillError], key: str) -> Any:
    if os.getcwd() not in sys.path:  # a console script does not search the folder it is called from
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        remedy = f"check that {module_name} is in the folder the command runs in, or installed"
        raise error(f"{key}: cannot import {path!r}: {missing}", remedy) from missing
    except Exception as failed:
        raise error(f"{key}: importing {path!r} failed: {type(failed).__name__}: {failed}", FIX) from failed


def load_file(path: str, file: str, error: type[TidemillError], key: str) -> Any:
    if not Path(file).is_file():
        raise error(f"{key}: {path!r}: there is no file {file}", "check the path, which is relative to this folder")
    name = f"tidemill_user_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as failed:
        del sys.modules[name]
        raise error(f"{key}: importing {path!r} failed: {type(failed).__name__}: {failed}", FIX) from failed
    return module
