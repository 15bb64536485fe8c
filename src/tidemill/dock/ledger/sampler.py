"""Samplers: choose which ready units a take gets, by metadata alone. Pure functions over arrays. A unit is a row, or a
complete group for a stage that wants groups. Every function is deterministic: the same arrays and the same seed give
the same choice on every machine."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tidemill.dock.api import Want
from tidemill.errors import DockError, did_you_mean

Ints = npt.NDArray[np.int64]

SAMPLERS = {
    "fifo": "in the order in which they became ready",
    "oldest": "oldest weight version first, then first come",
    "differing": "first come, but groups whose rewards are all equal are dropped on the way",
    "shuffle": "at random (seeded) from a window of what is ready",
    "replay": "at random (seeded), rows that the stage keeps; they stay, and none is consumed",
}


@dataclass(frozen=True, slots=True)
class Units:
    """What a sampler may use, one entry per ready unit, in queue order."""

    rows: Ints
    tokens: Ints
    spread: npt.NDArray[np.float64]  # largest minus smallest watched value inside the unit

    def __len__(self) -> int:
        return len(self.rows)


@lru_cache(maxsize=256)  # consumers repeat the same want
def check(want: Want) -> None:
    if want.sampler not in SAMPLERS:
        known = ", ".join(SAMPLERS)
        raise DockError(f"no sampler {want.sampler!r}{did_you_mean(want.sampler, SAMPLERS)}", f"use one of: {known}")
    if want.rows is None and want.groups is None and want.tokens is None:
        raise DockError("a want needs a limit", "give at least one of rows, groups, tokens")
    for name in ("rows", "groups", "tokens", "at_least", "ranks"):
        value = getattr(want, name)
        if value is not None and value < 1:
            raise DockError(f"want.{name} must be at least 1, got {value}")
    if want.seed < 0:
        raise DockError(f"want.seed must be 0 or more, got {want.seed}")
    if not 0 <= want.rank < want.ranks:
        raise DockError(f"want.rank must be from 0 to {want.ranks - 1} with {want.ranks} ranks, got {want.rank}")


def differing(units: Units) -> npt.NDArray[np.bool_]:
    """Select units whose rewards differ, so that they can teach something. Units of one row stay."""
    return (units.spread > 0) | (units.rows < 2) | np.isnan(units.spread)


def prefix(units: Units, want: Want, is_group: bool) -> int:
    """Return how many units from the front fit `want`. The first always fits a token budget: else it could never be
    given."""
    n = len(units)
    count_limit = want.groups if is_group else None
    if count_limit is not None:
        n = min(n, count_limit)
    if want.rows is not None:
        fits = int(np.searchsorted(np.cumsum(units.rows[:n]), want.rows, side="right"))
        n = min(n, max(fits, 1) if is_group else fits)
    if want.tokens is not None:
        fits = int(np.searchsorted(np.cumsum(units.tokens[:n]), want.tokens, side="right"))
        n = min(n, max(fits, 1))
    return n


def shuffle(n: int, seed: int, turn: int) -> Ints:
    """Return a random order of n units; `turn` counts decisions, so that each draws anew and a replay draws the
    same."""
    return np.random.default_rng([seed, turn]).permutation(n)


# Up to this total, two parts are split exactly by subset sums over a bit set; above, lengths are scaled down first.
EXACT_BITS = 1 << 16
REFINEMENTS = 32  # pairs re-split at most, or as many as there are ranks; each costs well under a millisecond
PARTNERS = 8  # lightest ranks that the heaviest is re-split with before it is left as it is
DIFFERENCED = 1 << 14  # units times ranks up to which largest differencing takes some 10 ms; it costs their product
CLOSE_ENOUGH = 0.002  # stop when the largest part is within 0.2 % of the mean


def balance(weights: Sequence[int] | Ints, ranks: int) -> list[Ints]:
    """Split units over ranks so that the heaviest rank is as light as possible: largest differencing where that is
    quick, else longest first, then exact re-splits of the heaviest rank with light ones. Never worse than
    `longest_first`. It must be quick: the ledger serves nobody meanwhile. Returns each rank's units, ascending."""
    sizes = np.asarray(weights, np.int64)
    if ranks == 1:
        return [np.arange(len(sizes))]
    candidates = [[part.tolist() for part in longest_first(sizes, ranks)]]
    if len(sizes) * ranks <= DIFFERENCED:
        candidates.insert(0, largest_differencing(sizes, ranks))
    parts = min(candidates, key=lambda parts: max(int(sizes[part].sum()) if part else 0 for part in parts))
    refine(sizes, parts)
    spread_over_empty(sizes, parts)
    return [np.array(sorted(part), np.int64) for part in parts]


def longest_first(weights: Sequence[int] | Ints, ranks: int) -> list[Ints]:
    """Split by the plain rule (heaviest unit to the lightest rank): the reference that `balance` must not fall
    behind."""
    sizes = np.asarray(weights, np.int64)
    heap = [(0, rank) for rank in range(ranks)]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for unit in np.argsort(-sizes, kind="stable").tolist():
        total, rank = heapq.heappop(heap)
        parts[rank].append(unit)
        heapq.heappush(heap, (total + int(sizes[unit]), rank))
    return [np.array(sorted(part), np.int64) for part in parts]


def largest_differencing(sizes: Ints, ranks: int) -> list[list[int]]:
    """Split as Karmarkar and Karp 1982, for many parts: merge the two most uneven partial splits, heaviest with
    lightest."""
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for unit, size in enumerate(sizes.tolist()):
        split: list[tuple[int, list[int]]] = [(size, [unit])] + [(0, []) for _ in range(ranks - 1)]
        heap.append((-size, unit, split))
    heapq.heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        merged = [(x[0] + y[0], x[1] + y[1]) for x, y in zip(a, reversed(b))]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    return [units for _, units in heap[0][2]] if heap else [[] for _ in range(ranks)]


def refine(sizes: Ints, parts: list[list[int]]) -> None:
    """Re-split the heaviest part exactly with another, as long as that helps."""
    totals = [int(sizes[part].sum()) if part else 0 for part in parts]
    target = sum(totals) / len(parts)
    for _ in range(max(REFINEMENTS, len(parts))):
        heavy = max(range(len(parts)), key=totals.__getitem__)
        if totals[heavy] <= target * (1 + CLOSE_ENOUGH):
            return
        for light in heapq.nsmallest(PARTNERS, range(len(parts)), key=totals.__getitem__):
            if light == heavy or totals[light] >= totals[heavy]:
                continue
            first, second = split_in_two(sizes, parts[heavy] + parts[light])
            new = int(sizes[first].sum()), int(sizes[second].sum())
            if max(new) < totals[heavy]:
                parts[heavy], parts[light] = first, second
                totals[heavy], totals[light] = new
                break
        else:
            return


def split_in_two(sizes: Ints, units: list[int]) -> tuple[list[int], list[int]]:
    """Find the most even split of `units`, by subset sums: bit s of `reachable[i]` says the first i units can sum to
    s."""
    scale = max(1, int(sizes[units].sum()) // EXACT_BITS)
    weights = [int(sizes[unit]) // scale for unit in units]
    reachable = [1]
    for weight in weights:
        reachable.append(reachable[-1] | reachable[-1] << weight)
    half = sum(weights) // 2
    best = (reachable[-1] & ((1 << (half + 1)) - 1)).bit_length() - 1
    first, second = [], []
    for i in range(len(units) - 1, -1, -1):
        if reachable[i] >> best & 1:
            second.append(units[i])
        else:
            first.append(units[i])
            best -= weights[i]
    return first, second


def spread_over_empty(sizes: Ints, parts: list[list[int]]) -> None:
    """Leave no rank without work while another has two units (units without tokens balance any way)."""
    donors = [(-len(part), i) for i, part in enumerate(parts) if len(part) > 1]
    heapq.heapify(donors)
    for part in parts:
        if part:
            continue
        if not donors:
            return
        _, i = heapq.heappop(donors)
        donor = parts[i]
        part.append(donor.pop(donor.index(min(donor, key=lambda unit: int(sizes[unit])))))
        if len(donor) > 1:
            heapq.heappush(donors, (-len(donor), i))
