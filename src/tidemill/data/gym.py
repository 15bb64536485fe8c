"""Tasks of the reasoning-gym package as generators; each task's own verifier is the reward `reasoning_gym`."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from typing import Any

from tidemill.data.generators import Generator, Problem
from tidemill.errors import DataError, MissingExtra, did_you_mean


def generator(task: str) -> Generator:
    """A generator of one task's problems; `data.args` are the task's own settings."""
    names = tasks()
    if task not in names:
        raise DataError(f"reasoning-gym has no task {task!r}{did_you_mean(task, names)}")

    def make(rng: random.Random, **args: Any) -> Problem:
        import reasoning_gym

        seed = rng.randrange(2**31)
        try:
            entry = reasoning_gym.create_dataset(task, size=1, seed=seed, **args)[0]
        except (AssertionError, TypeError, ValueError) as error:
            raise DataError(f"reasoning-gym task {task!r} refuses data.args {args}: {error}") from error
        meta = {"reasoning_gym": task, "seed": seed, "args": json.loads(json.dumps(args))}
        return Problem(entry["question"], str(entry["answer"]), None, meta)

    return make


@lru_cache(maxsize=1)
def tasks() -> tuple[str, ...]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise MissingExtra("data.source: reasoning_gym:…", "reasoning-gym", "rewards") from None
    return tuple(sorted(DATASETS))
