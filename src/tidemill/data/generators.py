"""Problems made on the spot: a registry of generators, and sources that keep held-out problems out of training.

A generator is a function `(rng, **args) -> Problem`. Whether a problem is held out is decided by a hash of its prompt
alone, never by the seed: a model warmed up with another seed has not seen the held-out problems either.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidemill.data.source import Example, FileRows, Message, Source
from tidemill.errors import DataError, did_you_mean
from tidemill.imports import built_in, check_arguments, is_import_path, load

HELD_OUT_SHARE = 8  # one problem in this many belongs to the held-out side
PACKAGES = {  # PREFIX:TASK
    "reasoning_gym": "tidemill.data.gym:generator",
    "gem": "tidemill.environment.gem:generator",
    "gymnasium": "tidemill.environment.gymnasium:generator",
    "openenv": "tidemill.environment.openenv:generator",
    "textarena": "tidemill.environment.textarena:generator",
    "verifiers": "tidemill.environment.verifiers:generator",
}
PATIENCE = 400  # draws in a row that land on the wrong side (or repeat) before the generator counts as exhausted


@dataclass(frozen=True, slots=True)
class Problem:
    """What a generator makes."""

    prompt: str | list[Message]
    answer: str
    response: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[Any, ...] = ()  # that the prompt shows
    key: str | None = None  # what tells it from others, where the prompt does not (a game whose openings are alike)

    @property
    def identity(self) -> str:
        return repr(self.prompt) if self.key is None else self.key


Generator = Callable[..., Problem]


def registry() -> dict[str, Generator]:
    from tidemill.data import code_tasks, domains, tasks

    return {**tasks.GENERATORS, **code_tasks.GENERATORS, **domains.GENERATORS}


def is_generator(name: str) -> bool:
    """A generator's name, `reasoning_gym:TASK` and its like, or an import path; anything else is a file or folder."""
    return name in registry() or name.partition(":")[0] in PACKAGES or is_import_path(name)


def find(name: str) -> Generator:
    known = registry()
    if name in known:
        return known[name]
    package, _, task = name.partition(":")
    if package in PACKAGES and task:
        made: Generator = built_in(PACKAGES[package])(task)
        return made
    if is_import_path(name):
        found: Generator = load(name, DataError, "data.source")
        return found
    raise DataError(f"no generator {name!r}{did_you_mean(name, known)}", f"the generators are {', '.join(known)}")


def open_pair(name: str, args: Mapping[str, Any], aside: int, seed: int) -> tuple[Source, Source]:
    """Training data, and `aside` problems that are not in it."""
    make = find(name)
    check_args(name, make, args)
    train = Generated(name, make, dict(args), seed)
    train.example(0)  # settings that cannot work are found now
    return train, held_out(name, make, dict(args), aside)


def check_args(name: str, make: Generator, args: Mapping[str, Any]) -> None:
    check_arguments(f"data.args: generator {name!r}", make, args, DataError)


def is_held_out(problem: Problem) -> bool:
    digest = hashlib.blake2b(problem.identity.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


def draw(name: str, make: Generator, args: Mapping[str, Any], rng: random.Random) -> Problem:
    try:
        return make(rng, **args)
    except DataError:
        raise
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise DataError(
            f"generator {name!r} cannot work with data.args {dict(args)}: {type(error).__name__}: {error}"
        ) from error


class Generated:
    """Endless training problems; problem `index` is always the same one."""

    size = None

    def __init__(self, name: str, make: Generator, args: Mapping[str, Any], seed: int) -> None:
        self.name, self.make, self.args, self.seed = name, make, args, seed

    def example(self, index: int) -> Example:
        rng = random.Random(f"{self.name} {self.seed} {index}")
        for _ in range(PATIENCE):
            problem = draw(self.name, self.make, self.args, rng)
            if not is_held_out(problem):
                return as_example(problem, f"{self.name}:{index}")
        raise DataError(
            f"generator {self.name!r} makes no problem that may be trained on: all of them are held out",
            "widen data.args, so that there are more different problems",
        )


def held_out(name: str, make: Generator, args: Mapping[str, Any], size: int) -> FileRows:
    """Different problems that training never sees, the same ones for every seed."""
    called = f"{name} (held out)"
    examples: list[Example] = []
    rng = random.Random(f"{name} held out")
    seen: set[str] = set()
    misses = 0
    while len(examples) < size and misses < PATIENCE:
        problem = draw(name, make, args, rng)
        key = problem.identity
        if key in seen or not is_held_out(problem):
            misses += 1
            continue
        misses = 0
        seen.add(key)
        examples.append(as_example(problem, f"{called}:{len(examples)}"))
    if size and not examples:
        raise DataError(
            f"generator {name!r} makes no problem that could be held out: it makes too few different ones",
            "widen data.args, name held-out data with data.eval_source, or set data.held_out=0",
        )
    return FileRows(called, tuple(examples))


def as_example(problem: Problem, where: str) -> Example:
    return Example(problem.prompt, problem.answer, problem.response, problem.meta, where, images=problem.images)
