"""How many answers a second the rewards judge."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from tidemill.bench import repeat
from tidemill.recipe.config import Rewards
from tidemill.reward.api import Sample
from tidemill.reward.score import Scorer

ABOUT = "answers judged per second: math (a mix as models give them, and the hard ones alone) in workers, last_number"
OPTIONS = {"answers": 4000, "hard_answers": 200, "workers": 0}  # workers 0: one per core


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    """`math`: the mix. `algebra`: only answers that need the computer algebra. `last_number`: in a thread."""
    count, hard, workers = int(options["answers"]), int(options["hard_answers"]), int(options["workers"])
    workers = workers or os.cpu_count() or 1
    result: dict[str, Any] = {"workers": workers, "answers": count, "hard_answers": hard}
    measured = (
        ("math", "math", partial(math_samples, count)),
        ("algebra", "math", partial(hard_samples, hard)),
        ("last_number", "last_number", partial(number_samples, count)),
    )
    for label, name, make in measured:
        rewards = Rewards(functions=(name,), workers=workers, timeout_s=5.0)
        seeds = itertools.count()  # every run has answers of its own: verdicts are kept, and must not be measured
        with Scorer(rewards) as scorer:
            scorer.score(number_samples(64 * workers))  # workers started and warm
            rate = repeat(lambda: answers_per_s(scorer, make(next(seeds))), options["repeats"])  # noqa: B023
            result |= {f"{label}_per_s": rate["median"], f"{label}_per_s_spread": rate["spread"]}
            result[f"{label}_errors"] = scorer.failures.failed
    return result


def answers_per_s(scorer: Scorer, samples: list[Sample]) -> float:
    began = time.perf_counter()
    scorer.score(samples)
    return len(samples) / (time.perf_counter() - began)


def math_samples(count: int, seed: int = 0) -> list[Sample]:
    """Two in three answers are numbers, a quarter fractions, the rest expressions; half are wrong."""
    rng = random.Random(seed)
    samples = []
    for i in range(count):
        a, b = rng.randint(1, 999), rng.randint(2, 99)
        kind = rng.random()
        if kind < 0.67:
            gold, given = str(a), f"{a}" if rng.random() < 0.5 else f"{a + 1}.0"
        elif kind < 0.92:
            gold, given = rf"\frac{{{a}}}{{{b}}}", f"{2 * a}/{2 * b}" if rng.random() < 0.5 else f"{a}/{b + 1}"
        else:
            gold = rf"{b}\sqrt{{{a}}}"
            given = gold.replace("\\sqrt", " \\sqrt") if rng.random() < 0.5 else rf"{b}\sqrt{{{a + 1}}}"
        samples.append(Sample("", rf"Let us see. So the answer is \boxed{{{given}}}.", gold, id=i))
    return samples


def hard_samples(count: int, seed: int = 0) -> list[Sample]:
    """Roots, products of brackets and sets that are the same by algebra only, or differ by it."""
    rng = random.Random(seed)
    samples = []
    for i in range(count):
        a, b, c = rng.randint(2, 99), rng.randint(2, 9), rng.randint(100, 999)
        gold, right, wrong = (
            (rf"{b}\sqrt{{{a}}}", rf"\sqrt{{{b * b * a}}}", rf"\sqrt{{{b * b * a}}}+0"),
            (f"(x+{a})(x-{b})", f"x^2+{a - b}x-{a * b}", f"y^2+{a - b}y-{a * b}"),
            (rf"\{{{a},{c}\}}", rf"\{{{c},{a}\}}", rf"\{{{c},{a + 1}\}}"),
        )[i % 3]
        samples.append(Sample("", rf"So it is \boxed{{{right if rng.random() < 0.5 else wrong}}}.", gold, id=i))
    return samples


def number_samples(count: int, seed: int = 0) -> list[Sample]:
    return [Sample("", f"12 + 5 = 17, then {i + seed}", str(i + seed), id=i) for i in range(count)]
