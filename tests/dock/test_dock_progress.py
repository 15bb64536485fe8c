"""What the ledger announces to control flow: a stage is done, idle, or has all that is left under lease."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tidemill.batch import Batch
from tidemill.dock import LeaseExpired, LocalDock, Progress, Want
from tidemill.dock.ledger.ledger import Ledger
from tidemill.dock.ledger.records import Written
from tidemill.dock.ledger.requeue import lose
from tidemill.graph import Stage

STAGES = (
    Stage("make", "r", ("prompt",), ("tokens",)),
    Stage("judge", "r", ("tokens",), ("score",), "group"),
    Stage("learn", "r", ("tokens", "score"), (), "group"),
)


def rows(first: int, n: int = 4) -> Batch:
    ids = np.arange(first, first + n)
    return Batch({"id": ids, "group": ids // 2, "group_size": np.full(n, 2), "prompt": ids})


def made(n: int, name: str) -> Batch:
    return Batch({name: np.arange(n)})


@pytest.fixture(params=["local", "remote"])
def dock(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "local":
        local = LocalDock(STAGES, lease_s=0.4, renews=True)
        yield local
        local.close()
        return
    pytest.importorskip("msgspec")
    from tidemill.dock.client import RemoteDock
    from tidemill.dock.server import DockServer
    from tidemill.dock.setup import DockSetup

    with DockServer(DockSetup(STAGES, lease_s=0.4, memory_bytes=1 << 26)) as server:
        remote = RemoteDock(server.address, renews=True)
        yield remote
        remote.close()


def test_progress_counts_what_a_stage_has_yet_to_do(dock: Any) -> None:
    dock.put(rows(0), tag="a")
    dock.put(rows(4), tag="b")
    assert dock.progress("make") == Progress(pending=8, ready=8)
    lease = dock.take("make", Want(rows=4, tag="a"))
    assert dock.progress("make", "a") == Progress(pending=4, leased=4)
    assert dock.progress("make", "a").is_all_leased and not dock.progress("make", "b").is_all_leased
    lease.commit(made(4, "tokens"))
    assert dock.progress("make", "a").is_done and not dock.progress("make").is_done
    assert dock.progress("judge", "a") == Progress(pending=4, ready=4)
    assert dock.progress("judge", "b") == Progress(pending=4)
    assert dock.progress("judge", "b").is_idle and not dock.progress("judge", "b").is_done


def test_whoever_waits_is_woken_by_the_commit_that_ends_the_stage(dock: Any) -> None:
    dock.put(rows(0), tag="a")
    lease = dock.take("make", Want(rows=4))
    woken: list[tuple[Progress, float]] = []

    def wait() -> None:
        woken.append((dock.progress("make", "a", until="done", wait=20.0), time.monotonic()))

    thread = threading.Thread(target=wait)
    thread.start()
    assert not dock.progress("make", "a", until="done", wait=0.1).is_done
    lease.commit(made(4, "tokens"))
    committed = time.monotonic()
    thread.join(5.0)
    ((progress, at),) = woken
    assert progress.is_done and at - committed < 0.5


def test_dropped_rows_are_no_longer_waited_for(dock: Any) -> None:
    dock.put(rows(0), tag="a")
    lease = dock.take("make", Want(rows=4))
    lease.commit(made(4, "tokens"), drop=[0, 1, 2, 3])
    assert dock.progress("learn", "a", until="done", wait=5.0).is_done


def test_a_lease_is_renewed_for_as_long_as_it_is_held(dock: Any) -> None:
    dock.put(rows(0))
    lease = dock.take("make", Want(rows=4))
    time.sleep(1.0)
    assert not lease.is_lost
    lease.commit(made(4, "tokens"))
    assert dock.progress("make").is_done


def test_a_lease_that_nobody_refers_to_runs_out(dock: Any) -> None:
    dock.put(rows(0))
    dock.take("make", Want(rows=4))
    gc.collect()
    assert dock.take("make", Want(rows=4), wait=5.0) is not None


def test_a_lost_lease_says_so() -> None:
    now = [0.0]
    dock = LocalDock(STAGES, lease_s=1.0, clock=lambda: now[0])
    dock.put(rows(0))
    for end in (lambda lease: lease.renew(), lambda lease: lease.commit(made(4, "tokens"))):
        lease = dock.take("make", Want(rows=4))
        assert lease is not None and not lease.is_lost
        now[0] += 2.0
        with pytest.raises(LeaseExpired):
            end(lease)
        assert lease.is_lost
        lease.abandon()  # has no effect: the rows are back already


def test_counts_agree_with_the_table_after_any_steps() -> None:
    """`pending` and `held` are kept step by step; here they are counted anew after each."""
    random = np.random.default_rng(3)
    ledger = Ledger(STAGES, lease_s=5.0, max_staleness=2, stale="requeue")
    now, next_id, next_chunk, leases = 0.0, 0, 0, list[tuple[int, str, int]]()

    def put() -> None:
        nonlocal next_id, next_chunk
        ids = np.arange(next_id, next_id + 4)
        what = Written(("id", "group", "prompt"), next_chunk, 8)
        ledger.put(ids, ids // 2, np.full(4, 2), what, f"t{next_id // 8 % 3}", now)
        next_id, next_chunk = next_id + 4, next_chunk + 1

    def take() -> None:
        stage = STAGES[random.integers(3)]
        grant = ledger.take(stage.name, Want(rows=4, late=bool(random.integers(2))), now)
        if grant is not None:
            leases.append((grant.lease, stage.name, grant.rows))

    def commit() -> None:
        nonlocal next_chunk
        if not leases:
            return
        lease, stage, n = leases.pop(int(random.integers(len(leases))))
        writes = ledger.controller(stage).stage.writes
        version = np.full(n, ledger.version, np.int32) if stage == "make" else None
        ids = [int(i) for i in ledger.rows.id[ledger.leases[lease].slots]] if lease in ledger.leases else []
        what = Written((*writes, *(("version",) if stage == "make" else ())), next_chunk if writes else -1, 8, version)
        next_chunk += 1
        with contextlib.suppress(LeaseExpired):
            ledger.commit(lease, what, ids[: int(random.integers(2))], now)

    def other() -> None:
        match int(random.integers(5)):
            case 0:
                ledger.advance(ledger.version + 1)
            case 1 if leases:
                ledger.abandon(leases.pop(0)[0])
            case 2:
                ledger.drop([int(random.integers(max(1, next_id)))])
            case 3:
                lose(ledger, [int(random.integers(max(1, next_chunk)))])
            case _:
                ledger.expire(now)

    steps: list[Callable[[], None]] = [put, take, take, commit, commit, other]
    for _ in range(1500):
        now += float(random.random())
        steps[int(random.integers(len(steps)))]()
        for c in ledger.controllers:
            live = ledger.rows.state == 1
            for tag in (None, *ledger.tags.values()):
                mine = live if tag is None else live & (ledger.rows.tag == ledger.tag_code(tag))
                pending = mine & ((ledger.rows.pending & c.bit) != 0)
                held = mine & ((ledger.rows.leased & c.bit) != 0)
                progress = ledger.progress(c.stage.name, tag)
                assert (progress.pending, progress.leased) == (pending.sum(), held.sum()), (c.stage.name, tag)
                assert progress.ready + progress.leased <= progress.pending
