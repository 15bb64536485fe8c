"""The door for processes of the ledger's machine: the same words as over ZeroMQ, and nobody in without the token."""

import multiprocessing
import os
import random
import select
import signal
import socket
import struct
import sys
import threading
import time

import numpy as np
import pytest
import zmq
from tests.dock.test_dock_remote import LEARN, rows

from tidemill.batch import Batch
from tidemill.dock import LeaseExpired, Want
from tidemill.dock.client import RemoteDock
from tidemill.dock.net import door as doors
from tidemill.dock.net import messages as m
from tidemill.dock.net.door import HEAD, HELLO_BYTES, MAX_STRANGERS, Door, DoorCaller, door_name, find_door
from tidemill.dock.net.wire import MAX_MESSAGE_BYTES, SEQ, Caller, listening_socket
from tidemill.dock.server import DockServer
from tidemill.dock.setup import DockSetup
from tidemill.errors import DockError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets")
SPAWN = multiprocessing.get_context("spawn")
TOKEN, ADDRESS = f"a token of {os.getpid()}", "tcp://127.0.0.1:1"  # tests of other processes have another door


class Echo:
    """A ledger that answers every request with how many it has had."""

    def __init__(self, silent_first: int = 0) -> None:
        self.door = Door(TOKEN, ADDRESS)
        self.silent, self.heard, self.left = silent_first, 0, []
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self.door, select.POLLIN)
        while not self._is_stopping:
            poller.poll(10)
            for client, seq, _ in self.door.receive(time.monotonic()):
                self.heard += 1
                if self.heard > self.silent:
                    self.door.send(client, seq, m.encode(m.Done(self.heard)))
            self.left += self.door.left
            self.door.left.clear()

    def stop(self) -> None:
        self._is_stopping = True
        self._thread.join()
        self.door.close()


@pytest.fixture
def echo():
    made = Echo()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with DockServer(DockSetup(LEARN, lease_s=60), tmp_path_factory.mktemp("dock")) as made:
        yield made


def eventually(is_so) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def knock() -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(5)
    peer.connect(door_name(TOKEN, ADDRESS))
    return peer


def test_a_process_on_the_ledgers_machine_comes_by_the_door(server):
    dock = server.connect()
    assert [type(caller) for caller in dock._callers.values()] == [DoorCaller]
    dock.close()


def test_without_a_door_the_caller_goes_over_the_network(server):
    dock = RemoteDock(server.address, by_door=False)
    assert [type(caller) for caller in dock._callers.values()] == [Caller]
    dock.put(rows([100]))
    lease = dock.take("learn", Want(rows=1), wait=30)
    assert lease.batch.values("id").tolist() == [100]
    lease.commit()
    dock.close()


def test_nobody_answers_at_a_door_of_another_dock():
    assert find_door("another token", ADDRESS) is None


def test_answers_belong_to_their_requests(echo):
    caller = DoorCaller(TOKEN, ADDRESS)
    assert [caller.ask(m.Missing(), 5).count for _ in range(3)] == [1, 2, 3]
    caller.close()


def test_a_request_is_sent_again_when_the_ledger_comes_back():
    first = Echo(silent_first=1)
    caller = DoorCaller(TOKEN, ADDRESS)
    answers = []
    asking = threading.Thread(target=lambda: answers.append(caller.ask(m.Missing(), 20)))
    asking.start()
    eventually(lambda: first.heard == 1)
    first.stop()
    second = Echo()
    asking.join(20)
    assert [a.count for a in answers] == [1] and caller.resent >= 1
    caller.close()
    second.stop()


def test_a_request_that_got_lost_is_sent_again_though_nothing_broke():
    echo = Echo(silent_first=1)
    caller = DoorCaller(TOKEN, ADDRESS)
    started = time.monotonic()
    assert caller.ask(m.Missing(), 20).count == 2
    assert time.monotonic() - started < 5 and caller.resent == 1 and not echo.left
    assert caller.ask(m.Missing(), 20).count == 3
    caller.close()
    echo.stop()


def test_over_the_network_a_request_that_got_lost_is_sent_again_though_nothing_broke():
    context = zmq.Context.instance()
    router = listening_socket(context, TOKEN)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def answer_the_second() -> None:
        first = router.recv_multipart()
        again = router.recv_multipart()
        assert first == again
        router.send_multipart((*again[:2], m.encode(m.Done(2))))

    server = threading.Thread(target=answer_the_second)
    server.start()
    caller = Caller(TOKEN, f"tcp://127.0.0.1:{port}")
    started = time.monotonic()
    assert caller.ask(m.Missing(), 20).count == 2
    assert time.monotonic() - started < 5 and caller.resent == 1
    server.join()
    caller.close()
    router.close()


def test_a_ledger_that_does_not_answer_is_reported_in_time(echo):
    echo.silent = 1 << 30
    caller = DoorCaller(TOKEN, ADDRESS)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer"):
        caller.ask(m.Missing(), 0.2)
    assert time.monotonic() - started < 3
    caller.close()


def test_closing_wakes_the_thread_that_waits(echo):
    echo.silent = 1 << 30
    caller = DoorCaller(TOKEN, ADDRESS)
    raised = []

    def wait():
        try:
            caller.ask(m.Missing(), 60)
        except DockError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: echo.heard == 1)
    caller.close()
    thread.join(10)
    assert raised and not thread.is_alive()


def test_long_messages_pass_in_pieces(server):
    dock = server.connect()
    ids = np.random.default_rng(0).permutation(300_000) + 1000  # no order: 5 MB of metadata each way
    dock.put(Batch({"id": ids, "group": ids, "x": np.zeros(len(ids), np.int8)}))
    lease = dock.take("learn", Want(rows=len(ids)), wait=30)
    assert np.array_equal(lease.batch.values("id"), ids)
    lease.commit()
    dock.close()


@pytest.mark.parametrize("length", [1, HELLO_BYTES - 1, HELLO_BYTES, 5000])
def test_random_bytes_are_refused_and_counted(echo, length):
    peer = knock()
    peer.sendall(random.Random(length).randbytes(length))
    peer.shutdown(socket.SHUT_WR)
    eventually(lambda: echo.door.refused == 1)
    peer.close()
    assert DoorCaller(TOKEN, ADDRESS).ask(m.Missing(), 5).count == 1


def test_a_peer_without_the_token_is_refused_and_does_not_believe_the_door(echo, monkeypatch):
    name = door_name(TOKEN, ADDRESS)
    monkeypatch.setattr(doors, "door_name", lambda *_: name)
    with pytest.raises(OSError):
        DoorCaller("not the token", ADDRESS)
    eventually(lambda: echo.door.refused == 1)


def test_a_huge_length_ends_its_connection_only(echo):
    good, bad = DoorCaller(TOKEN, ADDRESS), DoorCaller(TOKEN, ADDRESS)
    bad._connection.sendall(struct.pack("<I8s", MAX_MESSAGE_BYTES + 1, SEQ.pack(1)))
    eventually(lambda: echo.door.refused == 1)
    assert good.ask(m.Missing(), 5).count == 1
    good.close()


def test_a_frame_cut_short_is_counted(echo):
    caller = DoorCaller(TOKEN, ADDRESS)
    caller._connection.sendall(HEAD.pack(100, SEQ.pack(1)) + b"only this")
    caller.close()
    eventually(lambda: echo.door.refused == 1)
    assert echo.heard == 0


def test_strangers_who_say_nothing_are_let_go(echo):
    peers = [knock() for _ in range(MAX_STRANGERS + 20)]
    eventually(lambda: echo.door.refused >= 20)
    echo.door.sweep(time.monotonic() + 60)
    assert echo.door.refused == len(peers)
    assert DoorCaller(TOKEN, ADDRESS).ask(m.Missing(), 5).count == 1


def test_who_does_not_read_its_answers_delays_nobody(echo, monkeypatch):
    monkeypatch.setattr(doors, "MAX_UNREAD_BYTES", 1 << 20)
    lazy, good = DoorCaller(TOKEN, ADDRESS), DoorCaller(TOKEN, ADDRESS)
    good.ask(m.Missing(), 5)
    client = lazy._identity
    for _ in range(40):
        echo.door.send(client, SEQ.pack(1), bytes(1 << 16))
    eventually(lambda: client in echo.left)
    assert echo.door.refused == 1 and good.ask(m.Missing(), 5).count == 2


def _park(address, parked):
    dock = RemoteDock(address)
    parked.set()
    dock.take("learn", Want(rows=1), wait=60)


def test_rows_are_not_leased_to_a_consumer_that_died_waiting(server):
    parked = SPAWN.Event()
    dead = SPAWN.Process(target=_park, args=(server.address, parked), daemon=True)
    dead.start()
    assert parked.wait(30)
    dock = server.connect()
    eventually(lambda: dock.state().stages["learn"].waiting == 1)
    os.kill(dead.pid, signal.SIGKILL)
    dead.join()
    eventually(lambda: dock.state().stages["learn"].waiting == 0)
    dock.put(rows([7]))
    lease = dock.take("learn", Want(rows=1), wait=0.5)  # the lease would last a minute
    assert lease.batch.values("id").tolist() == [7]
    lease.commit()
    dock.close()


def _take_and_die(address, taken):
    lease = RemoteDock(address).take("learn", Want(rows=1), wait=60)
    taken.put(lease.batch.values("id").tolist())
    taken.close()
    taken.join_thread()
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_lease_of_a_consumer_that_died_comes_back_before_its_deadline(server):
    dock = server.connect()
    dock.put(rows([8]))
    taken = SPAWN.Queue()
    consumer = SPAWN.Process(target=_take_and_die, args=(server.address, taken), daemon=True)
    consumer.start()
    assert taken.get(timeout=30) == [8]
    lease = dock.take("learn", Want(rows=1), wait=30)  # leases of this dock last a minute
    assert lease.batch.values("id").tolist() == [8]
    lease.commit()
    dock.close()


def test_a_late_commit_of_a_client_that_hung_up_is_refused(server):
    dock = server.connect()
    dock.put(rows([9]))
    lease = dock.take("learn", Want(rows=1), wait=30)
    dock._callers[threading.current_thread()]._hang_up()
    other = server.connect()
    again = other.take("learn", Want(rows=1), wait=30)
    with pytest.raises(LeaseExpired):
        lease.commit()
    again.commit()
    for one in (dock, other):
        one.close()


def test_threads_that_ended_leave_no_connection_and_keep_their_leases(server):
    dock = server.connect()
    dock.put(rows(range(20, 26)))
    leases = []
    for _ in range(6):
        thread = threading.Thread(target=lambda: leases.append(dock.take("learn", Want(rows=1), wait=30)))
        thread.start()
        thread.join()
    assert len(dock._callers) <= 2
    for lease in leases:
        lease.commit()
    dock.close()


def test_a_forked_child_speaks_for_itself_and_leaves_its_parents_leases_alone(server):
    dock = server.connect()
    dock.put(rows([30]))
    lease, expired = dock.take("learn", Want(rows=1), wait=30), dock.state().expired
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if dock.state().stages["learn"].leased == 1 else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert dock.state().expired == expired and dock.state().stages["learn"].leased == 1
    lease.commit()
    dock.close()
