"""Keyed tables: rows by key, fields at any time, tasks that consume, and what stays when something dies."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from typing import Any

import numpy as np
import pytest

from tidemill.batch import Batch, Column
from tidemill.dock.keyed import state
from tidemill.dock.keyed.client import Chunk, KeyedDock
from tidemill.dock.keyed.partition import Absent, FieldKind
from tidemill.dock.keyed.sampling import First
from tidemill.dock.keyed.table import KeyedTable, Question
from tidemill.dock.keyed.tags import NO_TAGS, joined
from tidemill.dock.ledger.credit import Chunks
from tidemill.dock.net.journal import decode, encode
from tidemill.dock.server import DockServer
from tidemill.dock.setup import DockSetup, KeyedSetup
from tidemill.dock.store import chunk as chunks
from tidemill.errors import DockError

SPAWN = multiprocessing.get_context("spawn")
NO_CONFIG = b"\x80"
ALICE, BERT = b"a" * 8, b"b" * 8


def table(**options: Any) -> KeyedTable:
    made = KeyedTable(Chunks(), spare_rows=0, **options)
    made.effects = []
    return made


def put(made: KeyedTable, name: str, keys: list[str], chunk: int, *fields: str) -> Any:
    rows = made.rows_of(name, keys)
    made.write(name, rows, [FieldKind(field, "float32", shape=(2,)) for field in fields], chunk, 100)
    return rows


def ask(n: int, *fields: str, task: str = "t", name: str = "p") -> Question:
    return Question(name, task, fields, n)


def test_a_row_is_given_to_a_task_once_and_to_every_task() -> None:
    made = table()
    put(made, "p", ["a", "b", "c"], 1, "x")
    assert made.fetch(ask(2, "x"), 0.0, ALICE).tolist() == [0, 1]
    assert made.fetch(ask(2, "x"), 0.0, ALICE) is None
    assert made.fetch(ask(1, "x"), 0.0, ALICE).tolist() == [2]
    assert made.fetch(ask(3, "x", task="other"), 0.0, ALICE).tolist() == [0, 1, 2]


def test_rows_of_a_dead_consumer_are_given_again_and_those_it_had_finished_are_not() -> None:
    made = table()
    put(made, "p", list("abcd"), 1, "x")
    first = made.fetch(ask(2, "x"), 0.0, ALICE)
    made.fetch(ask(2, "x"), 0.0, ALICE)
    made.settle(ALICE, "p", first)
    made.release(BERT)
    assert made.fetch(ask(1, "x"), 0.0, BERT) is None
    made.release(ALICE)
    assert made.fetch(ask(2, "x"), 0.0, BERT).tolist() == [2, 3] and made.given_back == 2


def test_a_silent_consumers_rows_come_back_and_those_of_one_that_says_it_lives_do_not() -> None:
    made = table(lease_s=10.0)
    put(made, "p", ["a", "b"], 1, "x")
    made.fetch(ask(1, "x"), 0.0, ALICE)
    made.fetch(ask(1, "x"), 0.0, BERT)
    made.keep(BERT, 8.0)
    made.expire(12.0)
    assert made.partitions["p"].ready(["x"], "t").tolist() == [0]


class Remembers(First):
    """Gives one consumer the same again, as samplers of ranks do."""

    def __init__(self) -> None:
        self.given: dict[Any, Any] = {}

    def __call__(self, ready: Any, rows: int, who: str = "", **_: Any) -> Any:
        chosen = self.given.setdefault(who, ready[:rows])
        return chosen, chosen

    def has_cached_result(self, partition: str, task: str, config: Any) -> bool:
        return config.get("who") in self.given


def test_rows_that_the_sampler_remembers_wait_for_the_one_they_were_given_to() -> None:
    made = table(sampler=Remembers())
    put(made, "p", list("abcd"), 1, "x")
    mine = Question("p", "t", ("x",), 2, {"who": "me"})
    assert made.fetch(mine, 0.0, ALICE).tolist() == [0, 1]
    made.release(ALICE)
    assert made.fetch(Question("p", "t", ("x",), 2, {"who": "you"}), 0.0, BERT).tolist() == [2, 3]
    assert made.fetch(mine, 0.0, BERT).tolist() == [0, 1]


def test_a_table_that_is_full_refuses_new_rows() -> None:
    made = table(max_rows=3)
    put(made, "p", ["a", "b"], 1, "x")
    made.check_room(1)
    with pytest.raises(DockError, match="2 rows of at most 3"):
        made.check_room(2)


def test_tags_are_joined_without_opening_what_python_packed() -> None:
    closed = b"\x81\xa1a\xc7\x03\x10abc"  # {"a": an extension}
    assert joined(closed, b"\x81\xa1b\x01") == b"\x82\xa1a\xc7\x03\x10abc\xa1b\x01"
    assert joined(closed, NO_TAGS) == joined(NO_TAGS, closed) == closed


@pytest.mark.parametrize("seed", range(8))
def test_random_steps_keep_the_books_and_replay_to_the_same_table(seed: int) -> None:
    draw, made = random.Random(seed), table()
    where: dict[tuple[str, str, str], int] = {}  # partition, key, field -> chunk
    for chunk in range(120):
        name, what = draw.choice("pqr"), draw.random()
        keys = draw.sample("abcdefgh", draw.randint(1, 4))
        if what < 0.5:
            fields = draw.sample("xyz", draw.randint(1, 3))
            put(made, name, keys, chunk, *fields)
            where.update({(name, key, field): chunk for key in keys for field in fields})
        elif what < 0.7 and name in made.partitions:
            known = made.partitions[name].keys
            made.clear(name, [known[key] for key in keys if key in known])
            where = {at: c for at, c in where.items() if at[0] != name or at[1] not in keys}
        elif what < 0.75:
            made.drop(name)
            where = {at: c for at, c in where.items() if at[0] != name}
        elif what < 0.8 and where:
            gone = draw.choice(list(where.values()))
            made.lose([gone])
            where = {at: c for at, c in where.items() if c != gone}
        elif what < 0.95:
            owner = draw.choice([ALICE, BERT])
            made.fetch(ask(draw.randint(1, 3), draw.choice("xyz"), task=draw.choice("st"), name=name), chunk, owner)
        else:
            draw.choice([made.release, made.settle])(draw.choice([ALICE, BERT]))
        assert {at: _chunk(made, *at) for at in where} == where
        assert state.chunks_of(made) == set(where.values()) == {key for key, _ in made.chunks.items()}
    assert state.dump(_replayed(made.effects)) == state.dump(made)
    held = {key: (key, 100) for key in state.chunks_of(made)}
    loaded = KeyedTable(Chunks())
    state.load(loaded, state.dump(made), held)
    assert state.dump(loaded) == state.dump(made)
    for name in list(loaded.partitions):
        loaded.drop(name)
    assert not list(loaded.chunks.items()) and sorted(loaded.indexes.free) == list(range(loaded.indexes.next))


def _chunk(made: KeyedTable, name: str, key: str, field: str) -> int:
    partition = made.partitions[name]
    return int(partition.fields[field].chunk[partition.keys[key]])


def _replayed(effects: Any) -> KeyedTable:
    made = KeyedTable(Chunks(), spare_rows=0)
    for effect in effects:
        made.redo(tuple(decode(encode(effect))))
    return made


# -- across processes -------------------------------------------------------------------------------------------------


def chunk_of(**columns: Any) -> Chunk:
    batch = Batch({name: Column(np.asarray(values, np.float32)) for name, values in columns.items()})
    plan = chunks.plan(batch)
    return Chunk(plan.nbytes, lambda out: chunks.write(batch, plan, out))


def write(dock: KeyedDock, keys: list[str], **columns: Any) -> Any:
    kinds = [FieldKind(name, "float32", shape=(1,)) for name in columns]
    return dock.write("p", keys=keys, kinds=kinds, chunk=chunk_of(**columns))


def values(dock: KeyedDock, keys: list[str], field: str) -> list[float]:
    found = dock.read("p", keys=keys, fields=[field])
    assert found is not None
    return [float(found.chunks[int(c)][field].values[p]) for c, p in zip(*found.fields[field])]


def test_values_survive_the_death_of_ledger_and_warehouse(tmp_path: Any) -> None:
    with DockServer(DockSetup(()), tmp_path) as server:
        dock = KeyedDock(server.address)
        write(dock, ["a", "b"], x=[1, 2])
        taken = dock.fetch("p", "t", ["x"], 1, NO_CONFIG, 1.0)
        for keeper in (server.ledger, server.warehouses["node0"]):
            os.kill(keeper.pid, signal.SIGKILL)
            write(dock, ["b", "c"], x=[20, 30], y=[0, 0])
            assert values(dock, ["c", "a", "b"], "x") == [30, 1, 20]
        assert taken is not None and taken.indexes.tolist() == [0]
        rest = dock.fetch("p", "t", ["x"], 2, NO_CONFIG, 1.0)
        assert rest is not None and rest.indexes.tolist() == [1, 2]
        dock.close()


def test_a_snapshot_holds_the_table(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with DockServer(DockSetup(()), tmp_path) as server:
        dock = KeyedDock(server.address)
        write(dock, ["a", "b"], x=[1, 2])
        dock.close()
        server.ledger._process.terminate()  # it writes a snapshot as it ends, and is started again
        dock = KeyedDock(server.address)
        assert values(dock, ["b", "a"], "x") == [2, 1]
        dock.clear("p")
        assert dock.read("p", keys=["a"], fields=None) is None
        dock.close()


def test_what_is_not_there_is_told(tmp_path: Any) -> None:
    with DockServer(DockSetup(()), tmp_path) as server:
        dock = KeyedDock(server.address)
        rows = write(dock, ["a"], x=[1]).indexes
        with pytest.raises(Absent):
            dock.read("nowhere", indexes=rows, fields=["x"])
        dock.clear("p", keys=["a"])
        with pytest.raises(Absent, match="cleared"):
            dock.read("p", indexes=rows, fields=["x"])
        with pytest.raises(DockError, match="no partition 'nowhere'"):
            dock.look("nowhere")
        dock.close()


def _fetch_and_wait(address: Any, fetched: Any, finish: bool) -> None:
    dock = KeyedDock(address)
    rows = dock.fetch("p", "t", ["x"], 2, NO_CONFIG, 20.0)
    assert rows is not None
    if finish:
        dock.settle("p", rows.indexes[:1])
    fetched.put(rows.indexes.tolist())
    signal.pause()


@pytest.mark.parametrize("is_local", [True, False])
def test_a_killed_consumers_rows_go_to_the_one_that_waits(tmp_path: Any, is_local: bool) -> None:
    """On the ledger's machine at once; from another, when it has been silent."""
    with DockServer(DockSetup((), keyed=KeyedSetup(lease_s=1.0)), tmp_path) as server:
        dock = KeyedDock(server.address)
        write(dock, ["a", "b"], x=[1, 2])
        there = server.address if is_local else type(server.address)(server.address.ledger, server.address.token)
        fetched = SPAWN.Queue()
        consumer = SPAWN.Process(target=_fetch_and_wait, args=(there, fetched, True), daemon=True)
        consumer.start()
        assert fetched.get(timeout=60) == [0, 1]
        time.sleep(1.5)  # longer than its claim lasts: it says that it lives
        assert dock.fetch("p", "t", ["x"], 1, NO_CONFIG, 0.0) is None
        os.kill(consumer.pid, signal.SIGKILL)
        again = dock.fetch("p", "t", ["x"], 1, NO_CONFIG, 20.0)
        assert again is not None and again.indexes.tolist() == [1]
        dock.close()
