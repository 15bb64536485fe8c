"""Columns of a group: stored and sent once, and read as if every row had its own."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.batch import Batch, Column, GroupColumn
from tidemill.dock import LocalDock, PackedBuffer, Want
from tidemill.graph import Stage

STAGES = (
    Stage("make", "r", ("prompt", "answer", "kind", "own"), ("tokens",)),
    Stage("learn", "r", ("tokens", "prompt")),
)
SIZE = 4


def rows(groups: list[int], is_grouped: bool) -> Batch:
    place = np.repeat(np.arange(len(groups)), SIZE)
    ids = np.concatenate([np.arange(g * SIZE, (g + 1) * SIZE) for g in groups])
    shared = {
        "prompt": Column.jagged([np.arange(g % 7 * 30) + g for g in groups], np.int32),
        "answer": Column.text([f"answer \u00e9 {g}" for g in groups]),
        "kind": Column(np.array([[g, g + 1] for g in groups], np.int32)),
    }
    columns = {name: column.grouped(place) if is_grouped else column.gather(place) for name, column in shared.items()}
    return Batch({"id": ids, "group": ids // SIZE, "own": ids.astype(np.float32), **columns})


def same(ours: Batch, theirs: Batch) -> None:
    for name in theirs:
        assert ours[name].rows == theirs[name].rows and ours[name].is_text == theirs[name].is_text
        assert np.array_equal(ours[name].lengths, theirs[name].lengths), name
        assert all(np.array_equal(a, b) for a, b in zip(ours[name], theirs[name])), name
        assert np.array_equal(ours[name].values, theirs[name].values), name
        assert ours[name].values.dtype == theirs[name].values.dtype


@pytest.fixture(scope="module", params=["local", "remote"])
def docks(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """Two of a kind: one gets columns of groups, the other the same with a copy for each row."""
    if request.param == "local":
        yield LocalDock(STAGES), LocalDock(STAGES)
        return
    pytest.importorskip("msgspec")
    from tidemill.dock.server import DockServer
    from tidemill.dock.setup import DockSetup

    with DockServer(DockSetup(STAGES)) as one, DockServer(DockSetup(STAGES)) as two:
        yield one.connect(), two.connect()


@pytest.mark.parametrize("puts", [[[0, 1, 2, 3]], [[4, 5], [6]], [[7], [8], [9, 10]]])
@pytest.mark.parametrize("take", [1, 3, 4, 6, 100])
@pytest.mark.parametrize("is_packed", [False, True])
def test_every_reader_sees_what_it_would_see_if_each_row_had_its_own(
    docks: tuple[Any, Any], puts: list[list[int]], take: int, is_packed: bool
) -> None:
    start = int(docks[0].state().ended) // SIZE
    for dock, is_grouped in zip(docks, (True, False)):
        for groups in puts:
            dock.put(rows([g - puts[0][0] + start for g in groups], is_grouped))
    bytes_held = [dock.state().bytes for dock in docks]
    assert bytes_held[0] < bytes_held[1]
    while True:
        leases = [dock.take("make", Want(rows=take)) for dock in docks]
        if leases[0] is None:
            break
        batches = [lease.packed(PackedBuffer(pinned=False)) if is_packed else lease.batch for lease in leases]
        same(*batches)
        for lease in leases:
            lease.commit(Batch({"tokens": np.arange(lease.batch.rows)}))
    while (leases := [dock.take("learn", Want(rows=5)) for dock in docks])[0] is not None:
        same(leases[0].batch, leases[1].batch)
        for lease in leases:
            lease.commit()


def test_a_group_taken_alone_is_a_view_of_the_store() -> None:
    dock = LocalDock(STAGES)
    dock.put(rows([3, 4, 5], True))
    dock.take("make", Want(rows=SIZE))
    lease = dock.take("make", Want(rows=SIZE))
    assert lease is not None
    prompt = lease.batch["prompt"]
    assert isinstance(prompt, GroupColumn) and prompt.base.rows == 1 and not prompt.base.values.flags.owndata
    assert all(np.shares_memory(prompt[i], prompt[0]) for i in range(SIZE))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.data())
def test_operations_on_columns_of_groups_agree_with_plain_ones(index: list[int], data: st.DataObject) -> None:
    base = Column.jagged([np.arange(i) * 3 for i in (2, 0, 5, 1, 7, 3, 4)], np.int32)
    grouped: Column = base.grouped(index)
    plain = base.gather(np.array(index))
    start = data.draw(st.integers(0, len(index) - 1))
    n = data.draw(st.integers(1, len(index) - start))
    order = np.array(data.draw(st.lists(st.integers(0, len(index) - 1), max_size=8)), np.int64)
    for ours, theirs in (
        (grouped, plain),
        (grouped.slice(start, n), plain.slice(start, n)),
        (grouped.gather(order), plain.gather(order)),
        (Column.concat([grouped, grouped.slice(start, n)]), Column.concat([plain, plain.slice(start, n)])),
        (Column.concat([grouped, plain]), Column.concat([plain, plain])),
        (pickle.loads(pickle.dumps(grouped)), plain),
    ):
        same(Batch({"x": ours}), Batch({"x": theirs}))
