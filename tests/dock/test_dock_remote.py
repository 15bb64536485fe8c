"""The dock with its processes: the same promises from other processes, over two warehouses, with memory short."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from tests.dock.test_dock_local import STAGES, advantages, prompts, rewards, rollout, run_stage

from tidemill.batch import Batch
from tidemill.dock import LeaseExpired, Want, join
from tidemill.dock.client import RemoteDock, connect
from tidemill.dock.server import DockServer
from tidemill.dock.setup import DockSetup
from tidemill.dock.store.buffer import PackedBuffer
from tidemill.errors import DockError
from tidemill.graph import Stage

LEARN = (Stage("learn", "actor", ("x",)),)


def rows(ids, values=4) -> Batch:
    ids = np.asarray(ids)
    return Batch({"id": ids, "group": ids, "x": np.repeat(ids[:, None], values, 1).astype(np.float32)})


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    setup = DockSetup(STAGES, source=("prompt",), lease_s=60)
    with DockServer(setup, tmp_path_factory.mktemp("dock")) as made:
        yield made


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory):
    with DockServer(DockSetup(LEARN), tmp_path_factory.mktemp("dock"), nodes=("a", "b")) as made:
        yield made


def test_a_sample_passes_every_stage_once_and_leaves_nothing_behind(server):
    dock = connect(server.folder)
    dock.put(prompts(range(4)))
    dock.put(prompts(range(4)))
    assert list(run_stage(dock, "rollout", rollout)["prompt"]) == [f"prompt {i}" for i in range(4)]
    run_stage(dock, "reward", rewards)
    run_stage(dock, "advantage", advantages)
    batch = run_stage(dock, "learn", None)
    assert [row.tolist() for row in batch["tokens"]] == [[0], [1, 1], [2, 2, 2], [3, 3, 3, 3]]
    assert (dock.state().rows, dock.state().bytes, dock.state().ended) == (0, 0, 4)
    dock.close()


def test_a_parked_take_is_woken_by_the_put_that_satisfies_it(server):
    dock = server.connect()
    got = []

    def wait():
        lease = dock.take("rollout", Want(rows=2, at_least=2), wait=30)
        got.append(lease.batch.rows)
        lease.commit(drop=lease.batch.values("id").tolist())

    thread = threading.Thread(target=wait)
    thread.start()
    while not dock.state().stages["rollout"].waiting:
        time.sleep(0.005)
    started = time.monotonic()
    dock.put(prompts([100, 101]))
    thread.join(10)
    assert got == [2] and time.monotonic() - started < 1
    dock.close()


@pytest.mark.parametrize("is_local", [True, False])
def test_who_waits_for_a_dock_that_has_ended_is_woken_when_the_dock_is_left(tmp_path, is_local):
    said = []
    with DockServer(DockSetup(LEARN), tmp_path) as server:
        dock = RemoteDock(server.address if is_local else replace(server.address, local=""))

        def ask():
            try:
                while True:
                    dock.take("learn", Want(rows=1))
            except DockError as error:
                said.append(error.message)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        dock.state()  # it is up
    started = time.monotonic()
    dock.leave()
    thread.join(10)
    assert not thread.is_alive() and time.monotonic() - started < 2
    assert len(said) == 1 and "dock" in said[0]
    dock.close()


@pytest.mark.parametrize("is_local", [True, False])
def test_closing_a_dock_wakes_the_threads_that_wait_in_it(server, is_local):
    dock = RemoteDock(server.address if is_local else replace(server.address, local=""))
    said = []

    def wait():
        try:
            dock.take("reward", Want(rows=1), wait=60)
        except Exception as error:
            said.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    other = server.connect()
    thread.start()
    while not other.state().stages["reward"].waiting:
        time.sleep(0.005)
    dock.close()
    thread.join(5)
    assert not thread.is_alive() and [type(error) for error in said] == [DockError]
    other.close()


def test_a_producer_for_which_there_is_no_memory_is_woken_when_the_dock_is_left(tmp_path):
    with DockServer(DockSetup(LEARN, memory_bytes=12 << 20, segment_bytes=4 << 20), tmp_path) as server:
        dock = server.connect()
        held, said = [], []
        for i in range(2):  # 5 MiB each with what describes them
            dock.put(rows([i], values=1 << 20))
            held.append(dock.take("learn", Want(rows=1)).batch)  # looked at: not recycled, not spilled

        def put():
            try:
                dock.put(rows([9], values=1 << 20))
            except DockError as error:
                said.append(error.message)

        thread = threading.Thread(target=put, daemon=True)
        thread.start()
        while not dock.figures()["warehouses"]["node0"].get("writers_waiting"):  # a busy one may answer too late
            time.sleep(0.005)
        dock.leave()
        thread.join(5)
        assert not thread.is_alive() and "dock is closed" in said[0]
        del held
        dock.close()


def test_a_lease_given_up_is_refused_and_mistakes_are_named(server):
    dock = server.connect()
    dock.put(prompts([200, 201]))
    lease = dock.take("rollout", Want(rows=2))
    lease.renew()
    lease.abandon()
    with pytest.raises(LeaseExpired):
        lease.commit(rollout(lease.batch))
    with pytest.raises(DockError, match="did you mean rollout"):
        dock.take("rolout", Want(rows=2))
    run = dock.take("rollout", Want(rows=2))
    run.commit(drop=[200, 201])
    dock.close()


def test_reads_on_the_writers_node_are_views_and_can_be_packed_in_one_copy(two_nodes):
    dock = two_nodes.connect("a")
    dock.put(rows(range(8), values=1000))
    lease = dock.take("learn", Want(rows=8))
    view = lease.batch.values("x")
    assert not view.flags.owndata and not view.flags.writeable
    buffer = PackedBuffer(pinned=False)
    packed = lease.packed(buffer)
    assert np.array_equal(packed.values("x"), view) and packed.values("x").flags.writeable
    lease.commit()
    assert view[7, 999] == 7  # still ours, though the dock has let it go
    dock.close()


def test_another_node_pulls_each_chunk_once_however_many_read_it(two_nodes):
    a, b, other_b = (two_nodes.connect(node) for node in "abb")

    def pulled_bytes() -> int:
        return a.figures()["warehouses"]["b"].get("pulled_bytes", 0)

    before = pulled_bytes()
    big = 1 << 20  # values: 4 MiB a row, one chunk of 16 MiB over several streams
    a.put(rows(range(100, 104), values=big))
    first, second = b.take("learn", Want(rows=2)), other_b.take("learn", Want(rows=2))
    assert first.batch.values("x")[:, -1].tolist() == [100, 101]
    assert second.batch.values("x")[:, 0].tolist() == [102, 103]
    deadline = time.monotonic() + 5
    while (pulled := pulled_bytes() - before) == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert 4 * 4 * big <= pulled < 4 * 4 * big + 4096
    first.commit()
    second.commit()
    for dock in (a, b, other_b):
        dock.close()


def test_another_machine_joins_with_its_own_warehouse(two_nodes, tmp_path):
    node = join(two_nodes.folder, "c", "127.0.0.1", folder=tmp_path, memory_bytes=64 << 20)
    dock = node.connect()
    two_nodes.wait_announced("c")
    dock.put(rows([300]))
    assert two_nodes.connect("a").take("learn", Want(rows=1), wait=20).batch.values("x")[0, 0] == 300
    dock.close()
    node.close()


def test_segments_are_recycled_so_that_memory_does_not_grow(tmp_path):
    setup = DockSetup(LEARN, memory_bytes=64 << 20, segment_bytes=4 << 20)
    with DockServer(setup, tmp_path) as server:
        dock = server.connect()
        for i in range(60):
            dock.put(rows([i], values=1 << 20))
            dock.take("learn", Want(rows=1)).commit()
        time.sleep(0.5)
        figures = dock.figures()["warehouses"]["node0"]
        assert figures["recycled"] >= 40 and figures["used_bytes"] <= 64 << 20
        dock.close()


def test_more_than_memory_holds_goes_to_disk_and_comes_back(tmp_path):
    setup = DockSetup(LEARN, memory_bytes=16 << 20, segment_bytes=4 << 20)
    with DockServer(setup, tmp_path) as server:
        dock = server.connect()
        for i in range(10):
            dock.put(rows([i], values=1 << 20))  # 40 MiB in all
        time.sleep(0.5)
        assert dock.figures()["warehouses"]["node0"]["spilled_bytes"] > 0
        for i in range(10):
            lease = dock.take("learn", Want(rows=1))
            assert lease.batch.values("x")[0, ::100000].tolist() == [i] * 11
            lease.commit()
        dock.close()


def test_what_goes_to_disk_on_one_node_is_read_on_another_meanwhile(tmp_path):
    setup = DockSetup(LEARN, memory_bytes=16 << 20, segment_bytes=4 << 20)
    with DockServer(setup, tmp_path, nodes=("a", "b")) as server:
        writer, reader = server.connect("a"), server.connect("b")
        seen = []

        def read():
            while len(seen) < 24:
                lease = reader.take("learn", Want(rows=1), wait=30)
                seen.append((lease.ids.tolist(), lease.batch.values("x")[0, ::100000].tolist()))
                lease.commit()

        for i in range(12):
            writer.put(rows([i], values=700_000))
        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        for i in range(12, 24):
            writer.put(rows([i], values=700_000))
        thread.join(60)
        assert sorted(seen) == [([i], [i] * 7) for i in range(24)]
        assert server.warehouses["a"].restarts == server.warehouses["b"].restarts == 0
        for dock in (writer, reader):
            dock.close()


def test_a_full_dock_holds_the_producer_back_and_says_so(tmp_path):
    with DockServer(DockSetup(LEARN, max_rows=2), tmp_path) as server:
        dock = server.connect()
        dock.put(rows([0, 1]))
        thread = threading.Thread(target=dock.put, args=(rows([2]),))
        thread.start()
        while not dock.state().puts_waiting:
            time.sleep(0.005)
        dock.put(rows([9]), tag="other")  # each partition has its own credits
        dock.take("learn", Want(rows=1)).commit()
        thread.join(10)
        assert not thread.is_alive() and dock.state().rows == 3 and dock.state().put_wait_s > 0
        dock.close()


def test_a_dock_does_not_listen_to_the_whole_world():
    for host in ("0.0.0.0", "*", ""):
        with pytest.raises(DockError, match="every interface"):
            DockServer(DockSetup(LEARN), host=host)


def test_a_memory_smaller_than_a_segment_is_used_all_the_same(tmp_path):
    with DockServer(DockSetup(LEARN, memory_bytes=8 << 20), tmp_path) as server:
        dock = server.connect()
        dock.put(rows([1]))
        assert dock.take("learn", Want(rows=1), wait=20).batch.values("id").tolist() == [1]
        dock.close()
