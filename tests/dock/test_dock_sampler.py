"""Samplers over arrays: limits kept, nothing twice, balance close to the best known, the same every time."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.batch import Batch
from tidemill.dock import LocalDock, Want
from tidemill.dock.ledger.sampler import Units, balance, differing, longest_first, prefix, shuffle, spread_over_empty
from tidemill.errors import DockError
from tidemill.graph import Stage

lengths = st.lists(st.integers(1, 10_000), min_size=1, max_size=80)


def units(tokens, rows=None):
    n = len(tokens)
    return Units(np.array(rows or [1] * n), np.array(tokens), np.full(n, np.nan))


@given(lengths, st.integers(1, 50_000), st.integers(1, 100))
def test_a_prefix_respects_the_token_budget_and_could_not_be_longer(tokens, budget, rows):
    n = prefix(units(tokens), Want(tokens=budget, rows=rows), is_group=False)
    assert n >= 1
    assert n == 1 or sum(tokens[:n]) <= budget
    assert n <= rows
    assert n == len(tokens) or n == rows or sum(tokens[: n + 1]) > budget


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=8))
def test_ranks_without_work_get_it_from_those_with_most_units(drawn):
    parts, sizes = [], []
    for part in drawn:
        parts.append(list(range(len(sizes), len(sizes) + len(part))))
        sizes += part
    plain = [list(part) for part in parts]
    for part in plain:
        if not part:
            donor = max(plain, key=lambda p: (len(p) > 1, len(p)))
            if len(donor) > 1:
                part.append(donor.pop(donor.index(min(donor, key=lambda unit: sizes[unit]))))
    spread_over_empty(np.array(sizes, np.int64), parts)
    assert parts == plain


def test_thousands_of_ranks_without_work_cost_no_search_each():
    looked = 0

    class Part(list):
        def __len__(self):
            nonlocal looked
            looked += 1
            return super().__len__()

    spread_over_empty(np.ones(900, np.int64), [Part([i] if i < 900 else []) for i in range(2500)])
    assert looked < 10 * 2500


@given(lengths, st.integers(1, 9))
def test_balance_gives_every_unit_once_and_is_never_worse_than_longest_first(sizes, ranks):
    parts = balance(sizes, ranks)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(sizes)))
    heaviest = max(sum(sizes[i] for i in part) for part in parts)
    reference = max(sum(sizes[i] for i in part) for part in longest_first(sizes, ranks))
    assert heaviest <= reference
    if len(sizes) >= ranks:
        assert all(len(part) for part in parts)


@given(lengths, st.integers(1, 9))
def test_balance_is_the_same_every_time(sizes, ranks):
    assert [p.tolist() for p in balance(sizes, ranks)] == [p.tolist() for p in balance(np.array(sizes), ranks)]


def heaviest(sizes, ranks):
    return max(int(np.sum(np.array(sizes)[part])) for part in balance(sizes, ranks))


def test_balance_on_the_worst_cases_of_longest_first():
    """Graham 1969: two each of 2m-1 .. m+1 and three of m; the best is 3m, longest-first gives 4m-1."""
    for m in range(2, 17):
        sizes = [size for size in range(m + 1, 2 * m) for _ in (0, 1)] + [m] * 3
        assert max(sum(sizes[i] for i in part) for part in longest_first(sizes, m)) == 4 * m - 1
        assert heaviest(sizes, m) <= 3 * m * 1.05


def test_balance_on_triplets():
    """Falkenauer 1996: three items fill a bin exactly, so that the best partition is known and nothing is to spare."""
    rng = np.random.default_rng(0)
    for bins in (4, 8, 20, 40):
        sizes = []
        for _ in range(bins):
            first = int(rng.integers(380, 490))
            second = int(rng.integers((1000 - first) // 2, min(500, 1000 - first - 250)))
            sizes += [first, second, 1000 - first - second]
        rng.shuffle(sizes)
        assert heaviest(sizes, bins) <= 1050, bins


def test_balance_on_random_hard_instances():
    """Uniform sizes, few per rank: the hard region of Franca et al. 1994. No partition is below the mean."""
    rng = np.random.default_rng(1)
    for ranks in (2, 4, 8, 16):
        for per_rank in (5, 10):
            for top in (100, 10_000):
                sizes = rng.integers(1, top + 1, ranks * per_rank)
                best = max(-(-int(sizes.sum()) // ranks), int(sizes.max()))
                assert heaviest(sizes, ranks) <= best * 1.05, (ranks, per_rank, top)


DRAWS = {
    "lognormal": lambda rng, n: rng.lognormal(6, 1, n),
    "uniform": lambda rng, n: rng.integers(1, 4096, n),
    "two sizes": lambda rng, n: np.where(rng.random(n) < 0.1, 8192, 200),
    "nearly equal": lambda rng, n: rng.normal(1000, 5, n),
    "one huge": lambda rng, n: np.r_[rng.integers(1, 100, n - 1), 100_000],
}


@pytest.mark.parametrize("draw", DRAWS)
def test_balance_over_many_ranks_is_quick_and_good(draw):
    """4,096 rows over 256 ranks once blocked the ledger for more than a second."""
    sizes = DRAWS[draw](np.random.default_rng(2), 4096).astype(np.int64) + 1
    started = time.process_time()
    parts = balance(sizes, 256)
    assert time.process_time() - started < 0.25
    assert sorted(np.concatenate(parts).tolist()) == list(range(4096))
    most = max(int(sizes[part].sum()) for part in parts)
    assert most <= max(int(sizes[part].sum()) for part in longest_first(sizes, 256))
    largest = np.sort(sizes)[::-1]
    lowest = max(sizes.sum() / 256, largest[0], largest[255] + largest[256])  # some rank has two of the first 257
    assert most <= lowest * 1.01


def test_units_that_differ_are_kept():
    found = Units(np.array([4, 4, 1, 4]), np.zeros(4, int), np.array([0.0, 1.0, 0.0, np.nan]))
    assert differing(found).tolist() == [False, True, True, True]


def test_shuffle_depends_on_the_seed_and_the_turn_alone():
    assert shuffle(50, 1, 2).tolist() == shuffle(50, 1, 2).tolist()
    assert shuffle(50, 1, 2).tolist() != shuffle(50, 1, 3).tolist()
    assert shuffle(50, 2, 2).tolist() != shuffle(50, 1, 2).tolist()


made_groups = st.tuples(st.integers(1, 4), st.integers(1, 20), st.integers(0, 3))  # rows, length, version
wants = st.builds(
    Want,
    rows=st.integers(1, 12),
    groups=st.integers(1, 4),
    tokens=st.none() | st.integers(1, 60),
    at_least=st.integers(1, 4),
    sampler=st.sampled_from(["fifo", "oldest", "shuffle"]),
    seed=st.integers(0, 3),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(made_groups, max_size=12), st.lists(wants, max_size=12), st.booleans())
def test_every_sampler_gives_each_row_once_and_no_group_in_parts(groups, asked, is_group):
    stage = Stage("s", "r", ("x",), scope="group" if is_group else "sample")
    dock = LocalDock((stage,))
    size_of = {}
    next_id = 0
    for key, (size, length, version) in enumerate(groups):
        ids = np.arange(next_id, next_id + size)
        next_id += size
        size_of[key] = size
        columns = {"id": ids, "group": np.full(size, key), "group_size": np.full(size, size, np.int32)}
        columns |= {"length": np.full(size, length), "version": np.full(size, version), "x": ids}
        dock.put(Batch(columns))
    given_out: list[int] = []
    for want in asked:
        if (want.groups if is_group else want.rows) < want.at_least:
            with pytest.raises(DockError, match="can never have"):
                dock.take("s", want)
            continue
        lease = dock.take("s", want)
        if lease is None:
            continue
        batch = lease.batch
        given_out += batch.values("id").tolist()
        if want.tokens is not None and batch.rows > 1 and not is_group:
            assert batch.values("length").sum() <= want.tokens
        if is_group:
            keys, counts = np.unique(batch.values("group"), return_counts=True)
            assert all(size_of[int(key)] == count for key, count in zip(keys, counts))
            assert len(keys) <= want.groups
        else:
            assert batch.rows <= want.rows
        if want.sampler == "oldest":
            assert (np.diff(batch.values("version")) >= 0).all()
    assert len(set(given_out)) == len(given_out)
