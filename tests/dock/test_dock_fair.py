"""Who waits longest is served first, also where a long wait is asked for in pieces; a waiter's mistake is its own."""

import numpy as np
import pytest
from tests.dock.test_dock_remote import LEARN

from tidemill.dock import LocalDock, Want
from tidemill.dock.net import messages as m
from tidemill.dock.net.ledger_server import LedgerServer
from tidemill.dock.net.wire import SEQ, listen
from tidemill.dock.setup import DockSetup
from tidemill.errors import DockError


class Desk:
    """A ledger whose clients are names, whose clock is set by hand, and which sends nothing."""

    def __init__(self, folder, **settings):
        self.server = LedgerServer(DockSetup(LEARN, **settings), folder, "token", [listen("127.0.0.1")])
        self._seq = 0

    def ask(self, client: str, message: m.Message, now: float) -> None:
        self._seq += 1
        self.server._handle(client.encode().ljust(16), SEQ.pack(self._seq), m.encode(message), now)
        self.server._settle(now)

    def tick(self, now: float) -> None:
        self.server._tick(now)
        self.server._settle(now)

    def answers(self) -> list[tuple[str, str]]:
        """Who got what since the last call."""
        sent, self.server._outbox = self.server._outbox, []
        return [(client.decode().strip(), type(m.decode_answer(body)).__name__) for client, _, body in sent]

    def close(self) -> None:
        self.server.is_stopping = True
        self.server.run()


@pytest.fixture
def desk(tmp_path):
    made = Desk(tmp_path / "dock", max_rows=2)
    yield made
    made.close()


def put(ids, waited_s=0.0):
    raw = np.asarray(ids, np.int64).tobytes()
    return m.Put(raw, raw, None, m.Outputs(("id", "group", "x")), "", 1.0, waited_s)


def take(waited_s=0.0):
    return m.Take("learn", Want(rows=1), 1.0, waited_s)


def test_a_consumer_that_asks_again_keeps_its_place(desk):
    desk.ask("first", take(), now=0.0)
    desk.ask("second", take(), now=0.5)
    desk.tick(now=1.1)  # the first one's piece of its wait is over
    assert desk.answers() == [("first", "Nothing")]
    desk.ask("first", take(waited_s=1.1), now=1.1)
    desk.ask("producer", put([1]), now=1.2)
    assert sorted(desk.answers()) == [("first", "Granted"), ("producer", "Done")]


def test_a_producer_that_asks_again_keeps_its_place(desk):
    desk.ask("full", put([1, 2]), now=0.0)
    desk.ask("first", put([3]), now=0.0)
    desk.ask("second", put([4]), now=0.5)
    desk.tick(now=1.1)
    desk.ask("first", put([3], waited_s=1.1), now=1.1)
    desk.ask("consumer", take(), now=1.2)
    lease = m.decode_answer(desk.server._outbox[-1][2]).lease
    assert desk.answers() == [("full", "Done"), ("first", "Nothing"), ("consumer", "Granted")]
    desk.ask("consumer", m.Commit(lease, m.Outputs(), b""), now=1.3)
    assert sorted(desk.answers()) == [("consumer", "Done"), ("first", "Done")]
    assert desk.server._put_wait_s == pytest.approx(1.1 + 0.2)  # each second is counted once


def test_nobody_gets_ahead_by_saying_nonsense_about_its_wait(desk):
    desk.ask("first", take(), now=0.0)
    for i, waited_s in enumerate((-5.0, float("nan"))):
        desk.ask(f"odd {i}", take(waited_s), now=0.1)
    desk.ask("producer", put([1]), now=0.2)
    assert ("first", "Granted") in desk.answers()


def test_a_seed_that_no_generator_takes_is_refused():
    dock = LocalDock(LEARN)
    with pytest.raises(DockError, match=r"want\.seed"):
        dock.take("learn", Want(rows=1, sampler="shuffle", seed=-1))


def test_what_goes_wrong_for_one_who_waits_is_told_to_it_and_to_nobody_else(desk, monkeypatch):
    desk.ask("odd", take(), now=0.0)
    desk.ask("good", take(), now=0.0)
    ledger, sound = desk.server._ledger, desk.server._ledger.take

    def take_once(stage, want, now, owner=b""):
        monkeypatch.setattr(ledger, "take", sound)
        raise ValueError("of this want alone")

    monkeypatch.setattr(ledger, "take", take_once)
    desk.ask("producer", put([1]), now=0.1)
    assert sorted(desk.answers()) == [("good", "Granted"), ("odd", "Refused"), ("producer", "Done")]
