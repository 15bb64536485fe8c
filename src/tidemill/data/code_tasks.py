"""Small programming tasks with unit tests, checked by the reward `code` in the sandbox."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tidemill.data.generators import Generator, Problem
from tidemill.errors import DataError, did_you_mean


def affine(rng: random.Random) -> tuple[str, str, Callable[[int], Any]]:
    a, b = rng.randint(2, 9), rng.randint(1, 20)
    return f"return {a} times x plus {b}", f"{a}*x+{b}", lambda x: a * x + b


def power(rng: random.Random) -> tuple[str, str, Callable[[int], Any]]:
    n, b = rng.randint(2, 3), rng.randint(0, 20)
    return f"return x to the power {n} minus {b}", f"x**{n}-{b}", lambda x: x**n - b


def remainder(rng: random.Random) -> tuple[str, str, Callable[[int], Any]]:
    n, b = rng.randint(2, 12), rng.randint(0, 9)
    return f"return the remainder of x plus {b} divided by {n}", f"(x+{b})%{n}", lambda x: (x + b) % n


def digit_sum(rng: random.Random) -> tuple[str, str, Callable[[int], Any]]:
    n = rng.randint(1, 99)
    return (
        f"return the sum of the digits of x plus {n}",
        f"sum(map(int,str(x+{n})))",
        lambda x: sum(map(int, str(x + n))),
    )


def multiples(rng: random.Random) -> tuple[str, str, Callable[[int], Any]]:
    n = rng.randint(2, 30)
    return f"return whether x is a multiple of {n}", f"x%{n}==0", lambda x: x % n == 0


KINDS = {"affine": affine, "power": power, "remainder": remainder, "digit_sum": digit_sum, "multiples": multiples}


def code(rng: random.Random, kinds: list[str] | None = None, tests: int = 4) -> Problem:
    """A one-argument function to write; the answer is a JSON list of assertions that the reward `code` runs."""
    names = kinds or list(KINDS)
    for name in names:
        if name not in KINDS:
            raise DataError(f"data.args.kinds: no kind {name!r}{did_you_mean(name, KINDS)}")
    text, solution, reference = KINDS[rng.choice(names)](rng)
    inputs = rng.sample(range(100), tests)
    asserts = [f"assert f({x}) == {reference(x)!r}" for x in inputs]
    prompt = f"def f(x): # {text}\n    return "
    return Problem(prompt, json.dumps(asserts), solution, {"tests": asserts, "prefix": prompt})


GENERATORS: dict[str, Generator] = {"code": code}
