"""What commits count of rows is told once for each row: when it has left, whatever was lost on the way."""

import os
import signal

import numpy as np
import pytest

from tidemill.batch import Batch
from tidemill.dock import Counts, LeaseExpired, LocalDock, Want
from tidemill.errors import DockError
from tidemill.graph import Stage

STAGES = (Stage("make", "r", ("prompt",), ("tokens",)), Stage("learn", "r", ("tokens",)))


def rows(n: int) -> Batch:
    return Batch({"id": np.arange(n), "group": np.arange(n), "prompt": np.arange(n)})


def made(n: int, version: int = 0) -> Batch:
    return Batch({"tokens": np.arange(n), "version": np.full(n, version, np.int32)})


def make(dock, n: int, of_each: float) -> None:
    counts = Counts.of_rows([{"tokens": of_each}] * n, [{"share": 0.1}] * n)
    dock.take("make", Want(rows=n)).commit(made(n), counts=counts)


def test_counts_are_told_once_and_when_the_rows_have_left():
    dock = LocalDock(STAGES)
    dock.put(rows(10))
    make(dock, 10, of_each=3.0)
    assert dock.counted().sums == {}
    dock.take("learn", Want(rows=4)).commit()
    assert dock.counted().sums == {"tokens": 12.0}
    dock.take("learn", Want(rows=6)).commit()
    told = dock.counted()
    assert (told.sums, told.means) == ({"tokens": 18.0}, {"share": (pytest.approx(0.6), 6)})
    assert dock.counted().sums == {}


def test_a_mean_does_not_show_the_order_in_which_rows_left():
    found = set()
    for order in ([0.1, 0.2, 0.3, 1e16], [1e16, 0.3, 0.2, 0.1]):
        dock = LocalDock(STAGES)
        dock.put(rows(4))
        counts = Counts.of_rows([{}] * 4, [{"share": value} for value in order])
        dock.take("make", Want(rows=4)).commit(made(4), counts=counts)
        for _ in order:
            dock.take("learn", Want(rows=1)).commit()
        found.add(dock.counted().means["share"])
    assert len(found) == 1


def test_what_is_made_again_is_not_counted_twice():
    dock = LocalDock(STAGES, max_staleness=1, stale="requeue")
    dock.put(rows(4))
    make(dock, 4, of_each=3.0)
    dock.advance(5)  # too old now: back to the prompts
    dock.take("make", Want(rows=4)).commit(made(4, version=5), counts=Counts.of_rows([{"tokens": 7.0}] * 4, [{}] * 4))
    dock.take("learn", Want(rows=4)).commit()
    assert dock.counted().sums == {"tokens": 28.0}


def test_a_refused_commit_counts_nothing():
    now = [0.0]
    dock = LocalDock(STAGES, lease_s=10, clock=lambda: now[0])
    dock.put(rows(2))
    late = dock.take("make", Want(rows=2))
    now[0] = 11.0
    make(dock, 2, of_each=3.0)
    with pytest.raises(LeaseExpired):
        late.commit(made(2), counts=Counts({"tokens": [5.0, 5.0]}))
    dock.take("learn", Want(rows=2)).commit()
    assert dock.counted().sums == {"tokens": 6.0}


def test_counts_that_do_not_fit_the_rows_are_refused_and_the_lease_is_still_held():
    dock = LocalDock(STAGES)
    dock.put(rows(2))
    lease = dock.take("make", Want(rows=2))
    with pytest.raises(DockError, match="1 counts of 'tokens' came for 2 rows"):
        lease.commit(made(2), counts=Counts({"tokens": [5.0]}))
    lease.commit(made(2))


def test_a_dropped_row_counts_and_what_nobody_counted_of_it_is_left_out():
    dock = LocalDock(STAGES)
    dock.put(rows(3))
    counts = Counts.of_rows([{"dropped": 1.0}, {}, {}], [{"share": 1.0}, {}, {"share": 3.0}])
    dock.take("make", Want(rows=3)).commit(made(3), drop=[0], counts=counts)
    told = dock.counted()
    assert (told.sums, told.means) == ({"dropped": 1.0}, {"share": (1.0, 1)})
    dock.take("learn", Want(rows=3)).commit()
    told = dock.counted()
    assert (told.sums, told.means) == ({}, {"share": (3.0, 1)})


def test_counts_outlive_the_ledger_and_an_answer_that_was_lost(tmp_path):
    pytest.importorskip("msgspec")
    from tidemill.dock import connect, serve

    server = serve(STAGES, folder=tmp_path / "dock")
    try:
        dock, other = connect(server.address), connect(server.address)
        dock.put(rows(6))
        make(dock, 6, of_each=3.0)
        dock.take("learn", Want(rows=2)).commit()
        assert other.counted().sums == {"tokens": 6.0}  # `dock` never hears of this answer
        os.kill(server.ledger.pid, signal.SIGKILL)
        dock.take("learn", Want(rows=4), wait=20).commit()
        assert dock.counted().sums == {"tokens": 18.0}
        os.kill(server.ledger.pid, signal.SIGKILL)
        told = dock.counted()
        assert (told.sums, told.means, told.number) == ({}, {}, 3)
        assert other.written_bytes == other.read_bytes == 0  # who only asks touches no sample
    finally:
        server.close()
