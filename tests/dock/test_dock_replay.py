"""Rows that a stage keeps are read again and again, and end when newer ones take their place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tidemill.batch import Batch, Column
from tidemill.dock import LocalDock, Want
from tidemill.dock.server import serve
from tidemill.dock.setup import DockSetup
from tidemill.graph import Stage

KEPT = 10
STAGES = (
    Stage("rollout", "rollout", ("id", "group"), ("x",), "group"),
    Stage("learn", "actor", ("id", "group", "x"), (), "group", keeps=KEPT),
)


@pytest.fixture(params=["local", "served"])
def dock(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Any]:
    if request.param == "local":
        yield LocalDock(STAGES, ("id", "group"))
        return
    with serve(STAGES, tmp_path, source=("id", "group")) as server:
        made = server.connect()
        yield made
        made.close()


def made(dock: Any, step: int) -> Any:
    """Rows 4·step to 4·step + 3 pass rollout, and are held for learning."""
    ids = np.arange(4 * step, 4 * step + 4)
    dock.put(Batch({"id": ids, "group": ids // 2, "group_size": np.full(4, 2, np.int32)}))
    lease = dock.take("rollout", Want(groups=10))
    lease.commit(Batch({"x": Column.jagged([[float(i)] * 3 for i in lease.ids], np.float32)}))
    return dock.take("learn", Want(groups=10))


def test_the_newest_rows_are_drawn_with_their_values_and_the_oldest_end(dock: Any) -> None:
    for step in range(5):
        own = made(dock, step)
        drawn = dock.take("learn", Want(rows=300, sampler="replay", seed=step))
        assert set(drawn.ids) == set(range(max(0, 4 * step + 4 - KEPT), 4 * step + 4))
        assert all(set(x.tolist()) == {float(i)} for i, x in zip(drawn.ids, drawn.batch["x"]))
        for lease in (own, drawn) if step % 2 else (drawn, own):
            lease.commit()
        assert dock.state().rows == min(4 * step + 4, KEPT)
    assert dock.progress("learn").is_idle


def test_what_is_drawn_does_not_depend_on_when_the_step_commits(dock: Any) -> None:
    made(dock, 0).commit()
    own = made(dock, 1)
    want = Want(rows=50, sampler="replay", seed=7)
    before = dock.take("learn", want)
    own.commit()
    after = dock.take("learn", want)
    assert list(before.ids) == list(after.ids)
    assert list(dock.take("learn", Want(rows=50, sampler="replay", seed=8)).ids) != list(after.ids)


def test_rows_under_a_replay_lease_outlive_newer_ones(dock: Any) -> None:
    made(dock, 0).commit()
    drawn = dock.take("learn", Want(rows=20, sampler="replay"))
    for step in range(1, 4):
        made(dock, step).commit()
    assert dock.state().rows == KEPT + 4
    drawn.abandon()
    assert dock.state().rows == KEPT


def test_nothing_is_drawn_while_nothing_is_kept(dock: Any) -> None:
    assert dock.take("learn", Want(rows=5, sampler="replay")) is None


def test_a_setup_keeps_what_its_stages_keep() -> None:
    setup = DockSetup(STAGES, source=("id", "group"))
    assert DockSetup.from_json(setup.to_json()).stages == STAGES
