"""Tasks of the reasoning-gym package as generators; each task's own verifier is the reward `reasoning_gym`."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from tidemill.data.generators import Generator, Problem
from tidemill.errors import DataError, MissingExtra, did_you_mean

MIX = "mix"  # reasoning_gym:mix


def generator(task: str) -> Generator:
    """Return a generator of one task's problems, where `data.args` are the task's own settings; of `mix`, a generator
    of several tasks' problems."""
    if task == MIX:
        return mix
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
        answer = str(entry["answer"])
        return Problem(entry["question"], answer, answer, meta)

    return make


def mix(rng: random.Random, tasks: Mapping[str, Mapping[str, Any]]) -> Problem:
    """Make a problem of one of several tasks, each as likely as the others; `tasks` holds each one's settings."""
    if not tasks:
        raise DataError("data.args.tasks of reasoning_gym:mix names no task", "tasks: {chain_sum: {max_terms: 3}, …}")
    task = rng.choice(sorted(tasks))
    return generator(task)(rng, **tasks[task])


@lru_cache(maxsize=1)
def tasks() -> tuple[str, ...]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise MissingExtra("data.source: reasoning_gym:…", "reasoning-gym", "rewards") from None
    return tuple(sorted(DATASETS))
