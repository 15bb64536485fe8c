"""Parts die; samples do not. Targeted cases here, and a short run of the random ones."""

import dataclasses
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.dock.test_dock_local import STAGES, prompts, rewards, rollout, run_stage
from tests.dock.test_dock_remote import LEARN, rows

from tidemill.batch import Batch
from tidemill.dock import LeaseExpired, Want, join
from tidemill.dock.client import RemoteDock
from tidemill.dock.ledger.records import split
from tidemill.dock.net import messages as m
from tidemill.dock.net.ledger_server import LedgerServer
from tidemill.dock.net.wire import SEQ, listen
from tidemill.dock.server import DockServer
from tidemill.dock.setup import DockSetup
from tidemill.dock.store import chunk as chunks
from tidemill.errors import DockError
from tidemill.graph import Stage

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
SPAWN = multiprocessing.get_context("spawn")


def lose_warehouse(server, name):
    """The process and its bytes, as when the node dies."""
    hello = server.wait_announced(name)
    shutil.rmtree(hello.arena)
    os.kill(server.warehouses[name].pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while server.find(name) in (None, hello.warehouse):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _take_and_wait(address, taken):
    lease = RemoteDock(dataclasses.replace(address, local="")).take("learn", Want(rows=2), wait=10)
    taken.put(lease.batch.values("id").tolist())
    signal.pause()


def test_rows_of_a_consumer_that_dies_come_back(tmp_path):
    with DockServer(DockSetup(LEARN, lease_s=1.0), tmp_path) as server:
        dock = server.connect()
        dock.put(rows([1, 2]))
        taken = SPAWN.Queue()
        consumer = SPAWN.Process(target=_take_and_wait, args=(server.address, taken), daemon=True)
        consumer.start()
        assert taken.get(timeout=30) == [1, 2]
        os.kill(consumer.pid, signal.SIGKILL)
        lease = dock.take("learn", Want(rows=2, at_least=2), wait=10)
        assert lease.batch.values("id").tolist() == [1, 2] and dock.state().expired == 1
        dock.close()


def _write_half(address, written):
    dock = RemoteDock(address)
    _, stored = split(rows([1]), ("x",), "reward")
    plan = chunks.plan(stored)
    reservation = dock._node.reserve(plan.nbytes)
    reservation.target[: plan.nbytes // 2] = 1
    written.set()
    signal.pause()


def test_nothing_is_seen_of_a_put_whose_producer_died_half_way_and_its_memory_comes_back(tmp_path):
    with DockServer(DockSetup(LEARN), tmp_path) as server:
        dock = server.connect()
        written = SPAWN.Event()
        producer = SPAWN.Process(target=_write_half, args=(server.address, written), daemon=True)
        producer.start()
        assert written.wait(30)
        os.kill(producer.pid, signal.SIGKILL)
        producer.join()
        assert dock.state().rows == 0
        deadline = time.monotonic() + 60
        while dock.figures()["warehouses"]["node0"]["busy_bytes"] > 0:
            assert time.monotonic() < deadline, "the dead writer's segment stays lent"
            time.sleep(0.05)
        dock.put(rows([1]))
        assert dock.take("learn", Want(rows=1)).batch.values("x")[0, 0] == 1
        dock.close()


def test_a_restarted_ledger_knows_everything_but_the_leases(tmp_path):
    with DockServer(DockSetup(STAGES, source=("prompt",)), tmp_path) as server:
        dock = server.connect()
        dock.put(prompts(range(8)))
        run_stage(dock, "rollout", rollout, rows=6)
        run_stage(dock, "reward", rewards, rows=4)
        lease = dock.take("reward", Want(rows=2))
        started = time.monotonic()
        os.kill(server.ledger.pid, signal.SIGKILL)
        state = dock.state()  # the client finds its way back by itself
        assert time.monotonic() - started < 20  # under two seconds on a machine of its own: the soak measures it
        assert {name: (c.ready, c.done) for name, c in state.stages.items()} == {
            "rollout": (2, 6), "reward": (2, 4), "advantage": (4, 0), "learn": (0, 0),
        }  # fmt: skip
        with pytest.raises(LeaseExpired):
            lease.commit(rewards(lease.batch))
        assert list(dock.take("reward", Want(rows=9)).batch["tokens"])[1].tolist() == [5]
        dock.put(prompts(range(8)))
        assert dock.state().rows == 8
        dock.close()


def test_a_warehouse_process_that_dies_leaves_its_bytes_to_the_next(tmp_path):
    with DockServer(DockSetup(LEARN), tmp_path) as server:
        dock = server.connect()
        dock.put(rows([1, 2, 3]))
        os.kill(server.warehouses["node0"].pid, signal.SIGKILL)
        dock.put(rows([4], values=1 << 20))
        assert dock.take("learn", Want(rows=3)).batch.values("x")[:, 0].tolist() == [1, 2, 3]
        assert dock.take("learn", Want(rows=1)).batch.values("x")[0, -1] == 4
        assert dock.state().lost == 0
        dock.close()


def test_a_lost_warehouse_is_replaced_by_its_replica(tmp_path):
    with DockServer(DockSetup(LEARN, replicas=1), tmp_path, nodes=("a", "b")) as server:
        dock = server.connect("a")
        for i in range(10):
            dock.put(rows([i]))
        lose_warehouse(server, "a")
        for i in range(10):
            lease = dock.take("learn", Want(rows=1), wait=60)
            assert lease.batch.values("x")[0, 0] == i
            lease.commit()
        figures = dock.figures()
        assert (figures["lost"], figures["ended"], figures["short_of_copies"]) == (0, 10, 0)
        dock.close()


def test_without_a_replica_outputs_are_made_again_and_lost_sources_are_asked_for(tmp_path):
    stages = (Stage("double", "w", ("x",), ("y",)), Stage("learn", "w", ("x", "y")))
    with DockServer(DockSetup(stages), tmp_path, nodes=("a", "b")) as server:
        source, worker = server.connect("a"), server.connect("b")
        source.put(rows([1, 2]))
        lease = worker.take("double", Want(rows=1))
        lease.commit(Batch({"y": lease.batch.values("x") * 2}))
        lose_warehouse(server, "b")  # with the output of row 1
        state = source.state()
        assert (state.stages["double"].ready, state.stages["learn"].ready) == (2, 0)
        lose_warehouse(server, "a")  # with what was put
        assert sorted(source.missing()) == [1, 2] and source.state().rows == 0
        source.put(rows([1, 2]))
        assert source.take("double", Want(rows=2), wait=5).batch.values("x")[:, 0].tolist() == [1, 2]
        source.close()
        worker.close()


def test_a_take_whose_bytes_cannot_be_had_ends_in_time(tmp_path, monkeypatch):
    with DockServer(DockSetup(LEARN), tmp_path) as server:
        dock = server.connect()
        dock.put(rows([1]))
        monkeypatch.setattr(dock, "_open", lambda granted: dock.ask(m.Abandon(granted.lease)) and None)
        started = time.monotonic()
        assert dock.take("learn", Want(rows=1), wait=0.2) is None
        assert time.monotonic() - started < 10
        dock.close()


def test_a_writer_does_not_hold_on_to_a_lost_warehouse(tmp_path):
    with DockServer(DockSetup(LEARN), tmp_path) as server:
        dock = server.connect()
        dock.put(rows([1]))
        before = dock._node._writer
        lose_warehouse(server, "node0")
        dock.put(rows([2]))
        dock.put(rows([3], values=1 << 23))  # a segment of its own: what is not needed any more is looked for
        assert dock._node._writer is not before
        assert {str(arena) for arena, _ in dock._node._views._mapped} == {dock._node._home.arena}
        dock.close()


def test_a_node_that_leaves_is_not_waited_for(tmp_path):
    with DockServer(DockSetup(LEARN), tmp_path / "dock") as server:
        node = join(server.address.to_json(), "other", "127.0.0.1", folder=tmp_path / "node", segment_bytes=1 << 20)
        there = node.connect()
        there.put(rows([1, 2]))
        dock = server.connect()
        node.close()
        deadline = time.monotonic() + 30
        while not (missing := dock.missing()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert missing == [1, 2] and "other" not in dock.figures()["warehouses"]
        for one in (dock, there):
            one.close()


def test_a_warehouse_that_does_not_come_back_with_its_ledger_is_given_up(tmp_path):
    setup = DockSetup(LEARN, warehouse_timeout_s=0.01)
    ids = np.arange(3).tobytes()
    first = LedgerServer(setup, tmp_path, "token", [listen("127.0.0.1")])
    hello = m.Announce(1, "node0", "/nowhere", "tcp://127.0.0.1:1", "127.0.0.1:1", {0: 0}, 1)
    put = m.Put(ids, ids, None, m.Outputs(("id", "group", "x"), 8, (m.Copy(1, 0, 0, 0),)), "", 0.0)
    for i, message in enumerate((hello, put)):
        first._handle(b"client", SEQ.pack(i), m.encode(message), 0.0)
        first._flush()
    first.is_stopping = True
    first.run()
    second = LedgerServer(setup, tmp_path, "token", [listen("127.0.0.1")])
    second._tick(time.monotonic() + 1)
    assert second._ledger.missing == [0, 1, 2] and not second._ledger.slot_of
    second.is_stopping = True
    second.run()


def test_a_ledger_killed_again_and_again_is_back_each_time(tmp_path):
    with DockServer(DockSetup(LEARN), tmp_path) as server:
        dock = server.connect()
        dock.put(rows([1]))
        started = time.monotonic()
        for epoch in range(2, 7):
            os.kill(server.ledger.pid, signal.SIGKILL)
            while dock.figures()["epoch"] < epoch:
                time.sleep(0.001)
        assert time.monotonic() - started < 5 * 2.0 and server.ledger.restarts == 5
        assert dock.take("learn", Want(rows=1), wait=30).batch.values("x")[0, 0] == 1
        dock.close()


def test_what_starts_the_warehouse_may_die_too_and_its_bytes_stay(tmp_path):
    with DockServer(DockSetup(LEARN), tmp_path) as server:
        dock = server.connect()
        dock.put(rows([1]))
        keeper = server.warehouses["node0"]
        before, served = server.find("node0"), keeper.pid
        os.kill(keeper._process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while not keeper.restarts or keeper.pid == served:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        dock.put(rows([2]))
        assert dock.take("learn", Want(rows=2), wait=30).batch.values("x")[:, 0].tolist() == [1, 2]
        assert server.find("node0") == before and dock.state().lost == 0
        dock.close()


def _serve_and_wait(folder, pids):
    server = DockServer(DockSetup(LEARN), folder)
    hello = server.wait_announced("node0")
    pids.put((server.ledger.pid, server.warehouses["node0"].pid, hello.arena))
    signal.pause()


def test_when_the_starter_is_killed_its_processes_end_and_leave_no_memory_behind(tmp_path):
    told = SPAWN.Queue()
    starter = SPAWN.Process(target=_serve_and_wait, args=(tmp_path, told))
    starter.start()
    ledger, warehouse, arena = told.get(timeout=60)
    os.kill(starter.pid, signal.SIGKILL)
    starter.join()
    deadline = time.monotonic() + 30
    while Path(arena).exists() or any(Path(f"/proc/{pid}/exe").exists() for pid in (ledger, warehouse)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_cannot_start_is_given_up_and_its_log_shown(tmp_path):
    (tmp_path / "ledger").write_text("a file where its folder should be")
    threads = threading.active_count()
    with pytest.raises(DockError, match="does not start: it ended 5 times"):
        DockServer(DockSetup(LEARN), tmp_path)
    assert threading.active_count() <= threads  # nobody is left to watch what was started beside it


@pytest.mark.parametrize("name", ["", "../up", "a/b", "ledger", ".hidden"])
def test_a_name_that_would_be_another_file_is_refused(tmp_path, name):
    with pytest.raises(DockError, match="cannot be the name of a node"):
        DockServer(DockSetup(LEARN), tmp_path, nodes=(name,))


def test_random_kills_lose_nothing_and_double_nothing():
    import dock_faults

    result = dock_faults.run({"kills": 12, "seed": int(os.environ.get("FAULT_SEED", "3"))})
    assert result["rows"] > 0 and result["kills"] == 12
    assert (result["lost"], result["doubled"], result["wrong"]) == (0, 0, 0), result
