"""The most memory of a process is known by what it did, and reading it is cheap."""

import pytest

from tidemill.device import host, peaks
from tidemill.device.peaks import Peak, Peaks
from tidemill.flow.tally import Counted, Tally, together

MIB = 1 << 20


@pytest.fixture
def counter(monkeypatch):
    """What the allocator says at each asking, and how often it was asked."""
    told = {"now": 0, "asked": 0}

    def ask() -> int:
        told["asked"] += 1
        found, told["now"] = told["now"], 0
        return found

    monkeypatch.setattr(peaks, "_device_peak", ask)
    monkeypatch.setattr(host, "resident_peak", lambda: 7)
    return told


def test_a_peak_belongs_to_what_was_done_when_it_was_reached(counter):
    own = Peaks()
    for name, most in (("rollout", 300), ("learn", 900), ("rollout", 200)):
        own.begin(name)
        counter["now"] = most
        own.end(name)
    assert own.drain() == {"rollout": Peak(300, 7), "learn": Peak(900, 7)}
    assert own.whole().device == 900 and own.drain() == {"rollout": Peak(0, 7)}


def test_work_at_once_shares_its_peak(counter):
    own = Peaks()
    own.begin("rollout")
    own.begin("learn")
    counter["now"] = 500
    own.end("learn")
    counter["now"] = 100
    own.end("rollout")
    assert own.drain() == {"rollout": Peak(500, 7), "learn": Peak(500, 7)}


def test_work_of_one_kind_is_not_asked_about_again_and_again(counter):
    own = Peaks()
    for _ in range(1000):
        own.begin("rollout")
        own.end("rollout")
    assert counter["asked"] == 1


def test_the_host_s_mark_is_set_back():
    host.resident_peak()
    block = bytearray(64 * MIB)
    block[::4096] = b"x" * len(block[::4096])
    del block
    high = host.resident_peak()
    low = host.resident_peak()
    if low == high:
        pytest.skip("this kernel does not let a process set its mark back")
    assert high - low > 32 * MIB


def test_roles_of_several_processes_give_the_most_of_each():
    parts = [
        Counted({}, {}, [], {"learn": Peak(5, 9), "old_logprobs": Peak(8, 1)}),
        Counted({}, {}, [], {"learn": Peak(6, 2), "rollout": Peak(0, 3)}),
    ]
    assert together(parts) == {
        "machine/device_memory_peak/actor": 8.0,
        "machine/host_memory_peak/actor": 9.0,
        "machine/host_memory_peak/rollout": 3.0,
    }


def test_timed_work_counts_under_its_own_name(counter):
    tally = Tally(peaks=Peaks())
    with tally.time("learn"):
        counter["now"] = 400
    assert tally.drain().peaks == {"learn": Peak(400, 7)}
