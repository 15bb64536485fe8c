"""Tasks of an environment of the package `verifiers` as problems; `bridges/verifiers.py` plays them, in an interpreter
that has the package."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from tidemill.data.generators import Generator, Problem
from tidemill.environment.interpreter import CHECK_S, command
from tidemill.errors import DataError


def generator(taskset: str) -> Generator:
    """`python`: the interpreter; `environment` and `settings` as in the program's arguments."""

    def make(
        rng: random.Random, python: str, environment: str = "", settings: Mapping[str, Any] | None = None
    ) -> Problem:
        rows = tasks(python, taskset, environment, json.dumps(dict(settings or {}), sort_keys=True))
        number = rng.randrange(len(rows))
        return Problem(rows[number]["prompt"], "", None, {"task": number}, key=f"{taskset} {number}")

    return make


@lru_cache(maxsize=4)
def tasks(python: str, taskset: str, environment: str, settings: str) -> list[dict[str, Any]]:
    """Ask the other interpreter, once per process."""
    call = f"tell({taskset!r}, {environment!r}, {json.loads(settings)!r})"
    where = f"data.source verifiers:{taskset}"
    try:
        done = subprocess.run(
            command(python, "tidemill.bridges.verifiers", call),
            capture_output=True, text=True, timeout=CHECK_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        rows: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])["tasks"]
    except subprocess.TimeoutExpired:
        raise DataError(f"{where}: {python} gave no tasks in {CHECK_S:g} s") from None
    except (ValueError, IndexError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise DataError(f"{where}: {python} gave no tasks: {last}", "try it there with vf-eval") from None
    if not rows:
        raise DataError(f"{where} has no tasks")
    return rows
