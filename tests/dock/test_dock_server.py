"""What starts the dock's processes: it knows which are up, counts each end once, and ends when told to."""

import subprocess
import sys
import threading
import time

import pytest

from tidemill.dock import server as servers
from tidemill.dock.net import messages as m
from tidemill.dock.server import DockServer, Keeper, _tell_if_lost
from tidemill.dock.setup import DockSetup
from tidemill.errors import DockError

FIRST_AND_NEXT = """
if mkdir "$0"
then echo began 1; echo ready; $1
else while [ ! -e "$0/go" ]; do sleep 0.02; done; echo began 2; echo ready; exec sleep 60
fi
"""


@pytest.mark.parametrize("last_word", ["echo ended", "true"])
def test_a_starting_process_that_ends_is_counted_once_and_nothing_is_up_until_the_next(tmp_path, last_word):
    first = tmp_path / "first"
    keeper = Keeper("one", ["sh", "-c", FIRST_AND_NEXT, str(first), last_word], tmp_path / "log", lambda: None)
    deadline = time.monotonic() + 30
    while not keeper.restarts:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not keeper._is_up.is_set()
    (first / "go").touch()
    assert keeper.pid == 2 and keeper.restarts == 1
    keeper.stop()


def test_a_process_whose_starter_ended_before_it_could_watch_it_ends_too(tmp_path):
    command = [sys.executable, "-m", "tidemill.dock.net.process"]
    ended = subprocess.run([*command, "0", "ledger", str(tmp_path), "127.0.0.1", "0"], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, b"")


@pytest.mark.parametrize(
    "error", [TimeoutError("the ledger is away"), DockError("this dock was left", "connect again")]
)
def test_a_loss_that_cannot_be_told_is_no_failure_of_the_teller(tmp_path, error):
    asked = []

    def ask(message):
        asked.append(message)
        raise error

    _tell_if_lost(ask, m.Announce(7, "node0", str(tmp_path / "gone"), "tcp://x", "h:1", {}, 0))
    assert asked == [m.Lost(7)]


class NoProcess:
    def __init__(self, *_):
        pass

    def wait_ready(self):
        pass

    stop = wait_ready


def test_a_dock_is_closed_though_somebody_waits_for_its_ledger(tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "Keeper", NoProcess)
    dock, told = DockServer(DockSetup(()), tmp_path, nodes=()), []

    def ask():
        with pytest.raises(DockError, match="this dock is closed") as caught:
            dock.find("node0")
        told.append(caught)

    asker = threading.Thread(target=ask)
    asker.start()
    while not dock._lock.locked():
        time.sleep(0.001)
    started = time.monotonic()
    dock.close()
    assert time.monotonic() - started < servers.START_S / 4
    asker.join(10)
    assert told and dock._caller._connection is None
