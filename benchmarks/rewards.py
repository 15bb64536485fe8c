"""How many answers a second the rewards judge."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from tidemill.bench import repeat
from tidemill.config import Rewards
from tidemill.reward.api import Sample
from tidemill.reward.score import Scorer

ABOUT = "answers judged per second: math (a mix as models give them) in workers, last_number in a thread"
OPTIONS = {"answers": 4000, "workers": 0}  # 0: one per core


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    count, workers = int(options["answers"]), int(options["workers"]) or os.cpu_count() or 1
    result: dict[str, Any] = {"workers": workers, "answers": count}
    for name, samples in (("math", math_samples(count)), ("last_number", number_samples(count))):
        rewards = Rewards(functions=(name,), workers=workers, timeout_s=5.0)
        with Scorer(rewards) as scorer:
            scorer.score(samples[: 64 * workers])  # workers started and warm
            rate = repeat(partial(answers_per_s, scorer, samples), options["repeats"])
            result |= {f"{name}_per_s": rate["median"], f"{name}_per_s_spread": rate["spread"]}
            result[f"{name}_errors"] = sum(scorer.errors.values())
    return result


def answers_per_s(scorer: Scorer, samples: list[Sample]) -> float:
    began = time.perf_counter()
    scorer.score(samples)
    return len(samples) / (time.perf_counter() - began)


def math_samples(count: int) -> list[Sample]:
    """Two in three answers are numbers, a quarter fractions, the rest expressions; half are wrong."""
    rng = random.Random(0)
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


def number_samples(count: int) -> list[Sample]:
    return [Sample("", f"12 + 5 = 17, then {i}", str(i), id=i) for i in range(count)]
