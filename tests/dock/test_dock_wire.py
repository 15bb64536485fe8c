"""Callers that are closed while they are used: nothing is left open, and nobody trips over it."""

import threading

import pytest

from tidemill.dock.net import messages as m
from tidemill.dock.net.wire import Caller
from tidemill.dock.store.node import Node

NOWHERE = "tcp://127.0.0.1:1"


class ClosedLate:
    """A lock whose holder is about to let go when the caller is closed."""

    def __init__(self, caller):
        self._caller, self._lock = caller, threading.Lock()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self):
        self.acquire()

    def __exit__(self, *_):
        self._caller.close()
        self.release()


@pytest.mark.parametrize(
    "use", [lambda caller: caller.ask(m.AskSetup(), 1.0), lambda caller: caller.tell(m.AskSetup())]
)
def test_a_caller_closed_just_as_its_user_lets_go_is_closed(monkeypatch, use):
    caller = Caller("token", NOWHERE)
    monkeypatch.setattr(caller, "_busy", ClosedLate(caller))
    monkeypatch.setattr(caller, "_ask", lambda *_: "answer")
    use(caller)
    assert caller._socket.closed


def test_a_call_that_fails_while_its_node_is_closed_says_how_it_failed(monkeypatch):
    node = Node("token", None, lambda: ())

    def ask(*_, **__):
        node.close()
        raise TimeoutError("no answer")

    monkeypatch.setattr(Caller, "ask", ask)
    with pytest.raises(TimeoutError, match="no answer"):
        node._call(NOWHERE, m.AskFigures())
