"""What one consumer holds far too long is lent to a second: once in all, and whoever ends first counts."""

import numpy as np
import pytest

from tidemill.dock import LeaseExpired, Want
from tidemill.dock.ledger.leases import LEAST_ENDED
from tidemill.dock.ledger.ledger import Ledger
from tidemill.dock.ledger.records import Written
from tidemill.graph import Stage

STAGES = (Stage("make", "r", ("prompt",), ("tokens",), "group"), Stage("learn", "r", ("tokens",)))
WANT = Want(groups=1, late=True)


class Chunks:
    """Names chunks, as a store would."""

    def __init__(self):
        self.last = 0

    def __call__(self, *columns):
        self.last += 1
        return Written(columns, self.last, 10)


def straggling():
    """A ledger in which groups take a second each, and one that `a` began at 10."""
    ledger, chunk = Ledger(STAGES, lease_s=1000), Chunks()
    ids = np.arange(2 * (LEAST_ENDED + 1))
    ledger.put(ids, ids // 2, np.full(len(ids), 2), chunk("prompt"), "", 0.0)
    for i in range(LEAST_ENDED):
        grant = ledger.take("make", WANT, float(i), b"a")
        ledger.commit(grant.lease, chunk("tokens"), (), i + 1.0)
    return ledger, chunk, ledger.take("make", WANT, 10.0, b"a").owned()


def test_a_straggler_is_lent_to_another_after_three_times_the_usual_time():
    ledger, _, slow = straggling()
    assert ledger.take("make", WANT, 12.9, b"b") is None
    assert ledger.take("make", Want(groups=1), 20.0, b"b") is None  # who does not ask for it
    second = ledger.take("make", WANT, 13.1, b"b")
    assert second.ids.tolist() == slow.ids.tolist()
    assert ledger.take("make", WANT, 99.0, b"c") is None  # two are enough
    assert ledger.state(20.0).reissued == 1 and ledger.state(20.0).stages["make"].leased == 2


def test_nobody_is_lent_what_it_holds_itself():
    ledger, _, _ = straggling()
    assert ledger.take("make", WANT, 50.0, b"a") is None


@pytest.mark.parametrize("first_wins", [True, False])
def test_whoever_ends_first_counts_and_the_other_is_refused(first_wins):
    ledger, chunk, slow = straggling()
    second = ledger.take("make", WANT, 20.0, b"b")
    winner, loser = (slow, second) if first_wins else (second, slow)
    ledger.commit(winner.lease, chunk("tokens"), (), 21.0)
    with pytest.raises(LeaseExpired):
        ledger.renew(loser.lease, 21.0)
    with pytest.raises(LeaseExpired):
        ledger.commit(loser.lease, chunk("tokens"), (), 22.0)
    counts = ledger.state(22.0).stages
    assert counts["make"].leased == 0 and counts["make"].done == 2 * (LEAST_ENDED + 1)
    assert counts["learn"].ready == 2 * (LEAST_ENDED + 1)


@pytest.mark.parametrize("leaver", [b"a", b"b"])
def test_rows_are_given_out_again_only_when_both_have_let_go(leaver):
    ledger, chunk, slow = straggling()
    second = ledger.take("make", WANT, 20.0, b"b")
    stays = second if leaver == b"a" else slow
    assert ledger.release(leaver) == 1
    assert ledger.state(20.0).stages["make"].ready == 0
    third = ledger.take("make", WANT, 40.0, b"c")  # late again, and one holder only
    assert third.ids.tolist() == slow.ids.tolist()
    ledger.abandon(third.lease)
    ledger.abandon(stays.lease)
    counts = ledger.state(41.0).stages["make"]
    assert (counts.ready, counts.leased) == (2, 0)
    again = ledger.take("make", Want(groups=1), 42.0, b"b")
    ledger.commit(again.lease, chunk("tokens"), (), 43.0)
    assert ledger.state(43.0).stages["make"].done == 2 * (LEAST_ENDED + 1)
