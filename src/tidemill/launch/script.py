"""The shell text that starts the supervisor on a node: the same for every target that runs a script."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from tidemill.launch.options import Options
from tidemill.launch.snapshot import RECIPE


def supervisor(options: Options, code: str = "$PWD") -> str:
    """The one line that runs or resumes the recipe from the unpacked snapshot, which is the current folder."""
    path = f"{code}/src${{PYTHONPATH:+:$PYTHONPATH}}"
    start = f"{options.python} -m tidemill.launch.node --recipe {RECIPE} --restarts {options.restarts}"
    return f'PYTHONPATH="{path}" {start}'


def exports(variables: Mapping[str, str]) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


def script(options: Options, variables: Mapping[str, str] | None = None, code: str = "$PWD") -> str:
    """A job's script for one node; the current folder is the one it lies in."""
    lines = ["#!/bin/sh", 'cd "$(dirname "$0")/code" || exit 72']
    lines += exports({**options.env, **(variables or {})})
    lines += [options.setup] if options.setup else []
    return "\n".join([*lines, f"exec env {supervisor(options, code)}", ""])
