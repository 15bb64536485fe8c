"""A run of weeks: what the dock keeps follows from what is in it, not from what has passed through."""

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.dock import Want
from tidemill.dock.ledger import requeue as again
from tidemill.dock.ledger import snapshot
from tidemill.dock.ledger.ended import EndedIds
from tidemill.dock.ledger.ledger import Ledger
from tidemill.dock.ledger.records import Written
from tidemill.dock.net.messages import Announce, Copy
from tidemill.dock.store import segment as seg
from tidemill.dock.store.arena import Arena
from tidemill.dock.store.catalog import ORDERS_AT_ONCE, Catalog
from tidemill.dock.store.segment import Views
from tidemill.graph import Stage

STAGES = (Stage("make", "r", ("prompt",), ("tokens",)), Stage("learn", "r", ("tokens",)))


def through(ledger, ids, tag="", chunk=0):
    """Put rows and take them through both stages."""
    ids = np.asarray(ids)
    ledger.put(ids, ids, None, Written(("prompt",), 2 * chunk, 8), tag, 0.0)
    for i, stage in enumerate(STAGES):
        want = Want(rows=len(ids), tag=tag)
        lease = ledger.take(stage.name, want, 0.0).lease
        ledger.commit(lease, Written(stage.writes, 2 * chunk + 1 if i == 0 else -1, 8), (), 0.0)
    ledger.chunks.freed.clear()


@settings(deadline=None, max_examples=200)
@given(st.lists(st.lists(st.integers(-200, 600), max_size=40), max_size=30), st.booleans())
def test_ended_ids_are_what_a_set_would_hold(batches, reload):
    ended, plain = EndedIds(), set()
    for batch in batches:
        ended.add(np.array(batch, np.int64))
        plain |= set(batch)
        if reload:
            other = EndedIds()
            other.load(ended.dump())
            ended = other
    assert [i for i in range(-300, 700) if i in ended] == sorted(plain)


def test_ids_that_count_upwards_leave_one_range_behind():
    ended = EndedIds()
    for producer in range(3):
        for i in range(0, 64 * 100, 48):
            ended.add(np.arange(i, i + 48) + (producer << 40))
    assert ended.pieces <= 2 * 3


def test_a_ledger_through_which_much_has_passed_is_as_small_as_a_new_one():
    ledger = Ledger(STAGES)
    ledger.effects = None
    for i in range(300):
        through(ledger, np.arange(64 * i, 64 * i + 64), tag=f"step {i}", chunk=i)
    record, arrays = snapshot.dump(ledger)
    assert not record["tags"] and len(json.dumps(record, default=str)) < 1000
    assert ledger.state(0.0).rows == 0 and not ledger.chunks.held() and not list(ledger.chunks.items())
    assert len(ledger.rows.id) <= 1024 and ledger.ended_ids.pieces <= 2
    assert sum(array.nbytes for name, array in arrays.items() if name != "committed") < 2000
    for c in ledger.controllers:
        assert len(c.ready._orders["tag"]) <= 130


def test_parts_decided_for_a_rank_that_never_comes_are_forgotten():
    ledger = Ledger(STAGES, lease_s=1.0)
    for i in range(20):
        ids = np.arange(2 * i, 2 * i + 2)
        ledger.put(ids, ids, None, Written(("prompt",), i, 8), "", float(2 * i))
        ledger.expire(float(2 * i))
        assert ledger.take("make", Want(rows=2, at_least=2, rank=0, ranks=2), float(2 * i)) is not None
    assert len(ledger.controller("make").parts[1]) <= 2


def test_ids_to_be_put_again_survive_a_restart_of_the_ledger():
    ledger = Ledger(STAGES)
    ids = np.arange(3)
    ledger.put(ids, ids, None, Written(("prompt",), 0, 8), "", 0.0)
    again.lose(ledger, [0])
    assert ledger.missing == [0, 1, 2]
    other = Ledger(STAGES, epoch=2)
    snapshot.load(other, *snapshot.dump(ledger))
    assert other.missing == [0, 1, 2] and other.lost == 3


def test_a_lost_warehouse_leaves_nothing_in_the_catalog_but_its_name():
    catalog = Catalog()
    for key in range(5):
        catalog.announce(Announce(key, f"n{key}", "/x", "tcp://x", "h:1", {0: 0}, 1), 0.0)
        chunk = catalog.add(8, [Copy(key, 0, 0, 0)])
        catalog.retire(key, {7: 3})
        assert catalog.lose(key) == [chunk]
        catalog.free([chunk])
    assert not catalog._retired and not catalog._needed and not catalog._chunks and not catalog.warehouses


def test_a_destroyed_segment_is_not_kept_by_who_once_looked_at_it(tmp_path):
    arena = Arena(tmp_path / "arena", tmp_path / "spill", 1 << 30, 1 << 20)
    views = Views()
    for _ in range(10):
        segment = arena.lend(1 << 20)
        looked = views.read(arena.folder, segment.number, segment.generation, 0, 8)
        del looked
        arena.close(segment.number, segment.generation)
        arena._destroy(segment)
        assert not seg.path_of(arena.folder, segment.number).exists()
    assert len(views._mapped) <= 1


def announced(catalog, *keys):
    for key in keys:
        catalog.announce(Announce(key, f"n{key}", "/x", "tcp://x", "h:1", {0: 0}, 1), 0.0)


def test_with_nobody_to_copy_to_missing_copies_cost_nothing():
    catalog = Catalog(replicas=1)
    announced(catalog, 1)
    for _ in range(10):
        catalog.add(8, [Copy(1, 0, 0, 0)])
    assert catalog.short_of_copies() == 10 and catalog.orders(0.0) == []


def test_copies_are_ordered_some_at_a_time_and_again_when_nothing_came_of_it():
    catalog = Catalog(replicas=1)
    announced(catalog, 1, 2)
    keys = {catalog.add(8, [Copy(1, 0, 0, 0)]) for _ in range(ORDERS_AT_ONCE + 10)}
    first, second = catalog.orders(0.0), catalog.orders(0.1)
    assert len(first) == ORDERS_AT_ONCE and {warehouse for warehouse, _ in first + second} == {2}
    assert {chunk.key for _, chunk in first + second} == keys and catalog.orders(0.2) == []
    done = first[0][1].key
    catalog.add_copy(done, Copy(2, 0, 0, 0))
    again_ordered = {chunk.key for now in (1.5, 1.6) for _, chunk in catalog.orders(now)}
    assert again_ordered == keys - {done}
    new = catalog.add(8, [Copy(1, 0, 0, 0)])
    assert [chunk.key for _, chunk in catalog.orders(1.7)] == [new]  # before those that were ordered just now
