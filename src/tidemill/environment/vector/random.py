"""Chance for many slots at once, each from its own seed: the same numbers whatever is beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
U = np.uint64


def mixed(x: Array) -> Array:
    """SplitMix64's last steps (Steele et al. 2014): every bit of the result depends on every bit of x."""
    with np.errstate(over="ignore"):
        x = x + U(0x9E3779B97F4A7C15)
        x = (x ^ (x >> U(30))) * U(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> U(27))) * U(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> U(31)))


def uniform(seeds: Array, counters: Array) -> Array:
    """(seeds, counters) numbers from 0 to 1."""
    own = mixed(mixed(seeds.astype(np.uint64))[:, None] + counters.astype(np.uint64)[None])
    return (own >> U(11)).astype(np.float64) * 2.0**-53


def normal(seeds: Array, counters: Array) -> Array:
    """(seeds, counters) standard normal numbers (Box and Muller 1958)."""
    first, second = uniform(seeds, 2 * counters + 1_000_003), uniform(seeds, 2 * counters + 1_000_004)
    return np.sqrt(-2.0 * np.log(1.0 - first)) * np.cos(2.0 * np.pi * second)


def seeds_of(seed: int, slots: Array, ticks: Array) -> npt.NDArray[np.int64]:
    """31 bits for each slot and the tick at which its episode begins."""
    own = mixed(mixed(mixed(np.full(1, seed, np.uint64)) + slots.astype(np.uint64)) + ticks.astype(np.uint64))
    return (own >> U(33)).astype(np.int64)
