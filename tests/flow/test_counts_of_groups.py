"""Counts that are worked out for all rows at once agree with the plain way, group by group and row by row."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tidemill.batch import GROUP, Batch, Column
from tidemill.dock import Counts
from tidemill.dock.ledger.counts import CountBook
from tidemill.flow.stages.learning import distinct_in_rows
from tidemill.flow.stages.scoring import group_counts


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=8))
def test_distinct_values_of_each_row_whatever_their_order(rows: list[list[int]]) -> None:
    column = Column.jagged(rows, np.int32)
    assert distinct_in_rows(column).tolist() == [len(set(row)) for row in rows]


def test_a_column_of_one_value_a_row_has_one() -> None:
    assert distinct_in_rows(Column(np.array([3, 1, 2], np.int32))).tolist() == [1, 1, 1]


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-2, 2, width=32), st.booleans()), min_size=1, max_size=20))
def test_counts_of_groups_are_those_of_each_group_alone(rows: list[tuple[int, float, bool]]) -> None:
    groups, rewards, kept = (np.array(part) for part in zip(*rows))
    made = group_counts(Batch({GROUP: groups, "reward": rewards.astype(np.float32)}), kept)
    sums, means = {"dropped_samples": 0.0, "dropped_groups": 0.0}, {"equal_reward_groups": 0.0, "reward_std": 0.0}
    for group in sorted(set(groups.tolist())):
        inside = groups == group
        own = rewards[inside].astype(np.float32)
        sums["dropped_samples"] += float((~kept[inside]).sum())
        sums["dropped_groups"] += float(not kept[inside].any())
        means["equal_reward_groups"] += float(own.max() == own.min())
        means["reward_std"] += float(own.std())
    for name, values in (made.sums | made.means).items():
        assert len(values) == len(rows)
        assert np.isclose(sum(v for v in values if v is not None), (sums | means)[name])
    assert set(made.means) == set(means) and (set(made.sums) == set(sums) or kept.all())


def test_rows_without_counts_leave_nothing_behind() -> None:
    book = CountBook()
    book.note(np.arange(4), Counts({}, {"reward_std": [0.5, None, None, None]}))
    assert [i for _, noted in book.dump()["rows"] for i, _ in noted] == [0]
    book.leave(np.arange(4))
    assert book.tell(0).means == {"reward_std": (0.5, 1)}
