"""Micro-batches are packed near-linearly, and as well as by the plain form that tries every bin."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from tidemill.learn.rows.packing import Unit, fill

BUDGET = 16_384
MANY = 8192


def plain_fill(found: list[Unit], budget: int, multiple: int = 1, at_least: int = 1) -> list[Unit]:
    """Every count of bins in turn, every bin looked at for every unit."""
    needed = math.ceil(sum(tokens for tokens, _ in found) / budget)
    rounds = max(at_least, math.ceil(needed / multiple))
    while True:
        count = rounds * multiple
        bins: list[Unit] = [(0, []) for _ in range(count)]
        held = [0] * count
        for tokens, rows in sorted(found, key=lambda unit: -unit[0]):
            lightest = min(range(count), key=lambda i: bins[i][0])
            bins[lightest] = (bins[lightest][0] + tokens, bins[lightest][1] + rows)
            held[lightest] += 1
        if count >= len(found) or all(bins[i][0] <= budget or held[i] == 1 for i in range(count)):
            return bins
        rounds += 1


def lengths(kind: str, count: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    made = {
        "uniform": rng.integers(1, BUDGET, count),
        "short": rng.integers(1, 600, count),
        "lognormal": np.clip(rng.lognormal(7, 1.2, count), 1, 4 * BUDGET),
        "over a third": np.full(count, BUDGET // 3 + 1),
        "two sizes": rng.choice([100, BUDGET // 2 + 1], count),
        "heavy tail": np.clip(rng.pareto(1.1, count) * 300 + 1, 1, 2 * BUDGET),
        "over a half and thirds": rng.choice([BUDGET // 2 - 7, BUDGET // 3 + 5, BUDGET // 5], count),
    }[kind]
    return [int(n) for n in made]


KINDS = ("uniform", "short", "lognormal", "over a third", "two sizes", "heavy tail", "over a half and thirds")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("multiple", [1, 8])
def test_many_units_are_packed_in_little_time_and_few_bins(kind: str, multiple: int) -> None:
    sizes = lengths(kind, MANY)
    began = time.process_time()
    bins = fill([(n, [i]) for i, n in enumerate(sizes)], BUDGET, multiple)
    assert time.process_time() - began < 2.0  # the plain form: 5 to 185 s
    assert sorted(row for _, rows in bins for row in rows) == list(range(MANY))
    assert all(load == sum(sizes[r] for r in rows) for load, rows in bins)
    assert all(load <= BUDGET or len(rows) == 1 for load, rows in bins)
    alone = sum(n > BUDGET for n in sizes)
    rest = sum(n for n in sizes if n <= BUDGET) / BUDGET
    large = sum(BUDGET // 2 < n <= BUDGET for n in sizes)
    thirds = sum(BUDGET // 3 < n <= BUDGET for n in sizes) / 2
    assert len(bins) % multiple == 0
    assert len(bins) <= alone + 1.25 * max(rest, large, thirds) + multiple  # of what any packing needs


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_units_lie_as_the_plain_form_lays_them(kind: str) -> None:
    for seed in range(8):
        units = [(n, [i]) for i, n in enumerate(lengths(kind, 40, seed))]
        for multiple, at_least in ((1, 1), (3, 1), (2, 4)):
            assert fill(units, BUDGET, multiple, at_least) == plain_fill(units, BUDGET, multiple, at_least), seed
