"""The wire: requests and answers over a Unix socket and over TCP, and nobody in without the token."""

import dataclasses
import multiprocessing
import os
import random
import select
import signal
import socket
import struct
import threading
import time

import numpy as np
import pytest
from tests.dock.test_dock_remote import LEARN, rows

from tidemill.batch import Batch
from tidemill.dock import LeaseExpired, Want
from tidemill.dock.client import RemoteDock
from tidemill.dock.net import messages as m
from tidemill.dock.net import wire, wire_server
from tidemill.dock.net.caller import Caller, Link
from tidemill.dock.net.wire import HEAD, HELLO_BYTES, MAX_MESSAGE_BYTES, SEQ, SOCKET_FILE, Frames
from tidemill.dock.net.wire_server import MAX_STRANGERS, WireServer
from tidemill.dock.server import DockServer
from tidemill.dock.setup import DockSetup
from tidemill.dock.store.node import Node
from tidemill.errors import DockError

SPAWN = multiprocessing.get_context("spawn")
TOKEN = "a token"


class Echo:
    """A server that answers every request with how many it has had. As a dock's owner does, this process keeps the
    listening socket while one server ends and the next begins."""

    def __init__(self, folder, is_local: bool, silent_first: int = 0) -> None:
        self.listener = wire.listen_locally(folder) if is_local else wire.listen("127.0.0.1")
        self.address = "tcp://127.0.0.1:1" if is_local else wire.address_of(self.listener)
        self.local = str(folder / SOCKET_FILE) if is_local else ""
        self.silent, self.heard, self.left = silent_first, 0, []
        self.start()

    def start(self) -> None:
        self.door = WireServer(TOKEN, [self.listener.dup()])
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def caller(self, token: str = TOKEN, **settings) -> Caller:
        return Caller(token, self.address, self.local, **settings)

    def knock(self) -> socket.socket:
        return wire._open(self.address, self.local, time.monotonic() + 5)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self.door, select.POLLIN)
        while not self._is_stopping:
            poller.poll(10)
            for client, seq, _ in self.door.receive(time.monotonic()):
                self.heard += 1
                if self.heard > self.silent:
                    self.door.send(client, seq, m.encode(m.Done(self.heard)))
            self.left += [client for client, _ in self.door.left]
            self.door.left.clear()

    def stop(self) -> None:
        self._is_stopping = True
        self._thread.join()
        self.door.close()


@pytest.fixture(params=["unix", "tcp"])
def echo(request, tmp_path):
    made = Echo(tmp_path, request.param == "unix")
    yield made
    made.stop()
    made.listener.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with DockServer(DockSetup(LEARN, lease_s=60), tmp_path_factory.mktemp("dock")) as made:
        yield made


def from_elsewhere(address):
    """As another machine sees it, which has no such file."""
    return dataclasses.replace(address, local="")


def eventually(is_so) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def introduced(caller: Caller) -> Caller:
    caller.ask(m.Missing(), 5)
    return caller


@pytest.mark.parametrize("is_local", [True, False])
def test_a_process_on_the_ledgers_machine_comes_by_the_socket_file(server, is_local):
    dock = RemoteDock(server.address if is_local else from_elsewhere(server.address))
    assert [caller.is_local for caller in dock._callers.values()] == [is_local]
    dock.put(rows([100 + is_local]))
    lease = dock.take("learn", Want(rows=1), wait=30)
    assert lease.batch.values("id").tolist() == [100 + is_local]
    lease.commit()
    dock.close()


def test_where_no_server_answers_at_the_socket_file_the_network_is_used(server, tmp_path):
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / SOCKET_FILE))
    stale.close()  # the file stays
    dock = RemoteDock(dataclasses.replace(server.address, local=str(tmp_path / SOCKET_FILE)))
    assert not next(iter(dock._callers.values())).is_local
    dock.close()


def test_a_socket_file_may_lie_deep_and_only_its_owner_can_open_it(tmp_path):
    deep = tmp_path / ("a" * 100) / ("b" * 100)
    deep.mkdir(parents=True)
    listener = wire.listen_locally(deep)
    again = wire.listen_locally(deep)  # one that a killed process left behind is replaced
    assert (deep / SOCKET_FILE).stat().st_mode & 0o777 == 0o600
    for one in (listener, again):
        one.close()


@pytest.mark.parametrize("what", ["changed", "repeated", "left out"])
def test_over_the_network_a_frame_is_good_once_unchanged_and_in_its_place(what):
    key = os.urandom(32)
    ours, theirs = Frames(b"client", key), Frames(b"server", key)
    one, two = ours.pack(SEQ.pack(1), b"hello"), ours.pack(SEQ.pack(2), b"again")
    assert theirs.unpack(memoryview(one)) == [(SEQ.pack(1), b"hello")]
    bad = {"changed": two[:-20] + bytes([two[-20] ^ 1]) + two[-19:], "repeated": one}.get(what)
    bad = bad or ours.pack(SEQ.pack(3), b"third")
    with pytest.raises(ConnectionError, match="changed"):
        theirs.unpack(memoryview(bad))


@pytest.mark.parametrize("key", [b"", b"k" * 32])
def test_frames_come_whole_however_they_are_cut(key):
    ours, theirs = Frames(b"client", key), Frames(b"server", key)
    bodies = [random.Random(1).randbytes(n) for n in (0, 1, 5, 700, 3, 90_000)]
    stream = b"".join(ours.pack(SEQ.pack(i), body) for i, body in enumerate(bodies))
    got, at, cuts = [], 0, random.Random(2)
    while at < len(stream):
        n = cuts.choice((1, 3, 11, 12, 13, 400, 5000))
        got += theirs.unpack(memoryview(stream[at : at + n]))
        at += n
    assert got == [(SEQ.pack(i), body) for i, body in enumerate(bodies)]


def test_answers_belong_to_their_requests(echo):
    caller = echo.caller()
    assert [caller.ask(m.Missing(), 5).count for _ in range(3)] == [1, 2, 3]
    caller.close()


def test_a_request_is_sent_again_when_the_ledger_comes_back(echo):
    echo.silent = 1
    caller = echo.caller()
    answers = []
    asking = threading.Thread(target=lambda: answers.append(caller.ask(m.Missing(), 20)))
    asking.start()
    eventually(lambda: echo.heard == 1)
    echo.stop()
    echo.start()
    asking.join(20)
    assert [a.count for a in answers] == [2] and caller.resent >= 1
    caller.close()


def test_a_request_that_got_lost_is_sent_again_though_nothing_broke(echo):
    echo.silent = 1
    caller = echo.caller()
    started = time.monotonic()
    assert caller.ask(m.Missing(), 20).count == 2
    assert time.monotonic() - started < 5 and caller.resent == 1 and not echo.left
    assert caller.ask(m.Missing(), 20).count == 3
    caller.close()


def test_a_ledger_that_does_not_answer_is_reported_in_time(echo):
    echo.silent = 1 << 30
    caller = echo.caller()
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer"):
        caller.ask(m.Missing(), 0.2)
    assert time.monotonic() - started < 3
    caller.close()


def test_closing_wakes_the_thread_that_waits(echo):
    echo.silent = 1 << 30
    caller = echo.caller()
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
    peer = echo.knock()
    peer.sendall(random.Random(length).randbytes(length))
    peer.shutdown(socket.SHUT_WR)
    eventually(lambda: echo.door.refused == 1)
    peer.close()
    assert echo.caller().ask(m.Missing(), 5).count == 1


def test_a_peer_without_the_token_is_refused_and_does_not_believe_the_server(echo):
    with pytest.raises(TimeoutError):
        echo.caller("not the token").ask(m.Missing(), 0.2)
    eventually(lambda: echo.door.refused >= 1)
    assert echo.heard == 0


def test_who_knows_another_address_is_told_at_once_that_nobody_answers(echo):
    caller = echo.caller(patience_s=0.0)
    assert caller.ask(m.Missing(), 5).count == 1
    echo.silent = 1 << 30
    with pytest.raises(TimeoutError):
        caller.ask(m.Missing(), 2.0)
    assert echo.heard == 2  # and is not sent twice: the other side would do it twice
    echo.stop()
    echo.listener.close()
    started = time.monotonic()
    with pytest.raises(ConnectionError, match="went away"):
        caller.ask(m.Missing(), 5)
    assert time.monotonic() - started < 1
    echo.listener = socket.socket()
    echo.start = lambda: None


def test_a_link_comes_back_and_says_so(echo):
    heard = []
    link = Link(TOKEN, echo.address, heard.append)
    if echo.local:
        link.close()  # warehouses come over the network
        return
    eventually(lambda: heard == [None])
    link.tell(m.Missing())
    eventually(lambda: len(heard) == 2 and heard[1].count == 1)
    echo.stop()
    echo.start()
    eventually(lambda: heard[2:] == [None])
    link.tell(m.Missing())
    eventually(lambda: len(heard) == 4)
    link.close()


def test_a_call_that_fails_while_its_node_is_closed_says_how_it_failed(monkeypatch):
    node = Node("token", None, lambda: ())

    def ask(*_, **__):
        node.close()
        raise TimeoutError("no answer")

    monkeypatch.setattr(Caller, "ask", ask)
    with pytest.raises(TimeoutError, match="no answer"):
        node._call("tcp://127.0.0.1:1", m.AskFigures())


def test_a_huge_length_ends_its_connection_only(echo):
    good, bad = echo.caller(), introduced(echo.caller())
    bad._connection.sendall(struct.pack("<I8s", MAX_MESSAGE_BYTES + 1, SEQ.pack(1)))
    eventually(lambda: echo.door.refused == 1)
    assert good.ask(m.Missing(), 5).count == 2
    good.close()


def test_a_frame_cut_short_is_counted(echo):
    caller = introduced(echo.caller())
    caller._connection.sendall(HEAD.pack(100, SEQ.pack(1)) + b"only this")
    caller.close()
    eventually(lambda: echo.door.refused == 1)
    assert echo.heard == 1


def test_strangers_who_say_nothing_are_let_go(echo):
    peers = [echo.knock() for _ in range(MAX_STRANGERS + 20)]
    eventually(lambda: echo.door.refused >= 20)
    echo.door.sweep(time.monotonic() + 60)
    assert echo.door.refused == len(peers)
    assert echo.caller().ask(m.Missing(), 5).count == 1


def test_who_does_not_read_its_answers_delays_nobody(echo, monkeypatch):
    monkeypatch.setattr(wire_server, "MAX_UNREAD_BYTES", 1 << 20)
    lazy, good = introduced(echo.caller()), introduced(echo.caller())
    client = lazy._identity
    for _ in range(400):
        echo.door.send(client, SEQ.pack(1), bytes(1 << 16))
    eventually(lambda: client in echo.left)
    assert echo.door.refused == 1 and good.ask(m.Missing(), 5).count == 3


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
