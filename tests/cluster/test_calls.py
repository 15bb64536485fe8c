"""What ranks of a cut learner do together they do in one order: the first rank's, the driver's words among it."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.cluster.worker.commands import RoleWorker
from tidemill.cluster.worker.cut import KEPT_CALLS, Calls
from tidemill.cluster.worker.learners import World
from tidemill.cluster.worker.store import KeyedStore, StoreServer
from tidemill.errors import CollectiveError


def open_store() -> KeyedStore:
    return KeyedStore(StoreServer("127.0.0.1").address, timedelta(seconds=10))


class Worker:
    def __init__(self, said: list[str]) -> None:
        self.said = said

    def together(self, what: str) -> None:
        self.said.append(f"learn:{what}")

    def begin(self, first_group: int, tag: str | None) -> None:
        self.said.append(f"begin {first_group}")


def rank(store: Any, number: int, wait_s: float = 0.2) -> tuple[RoleWorker, list[str]]:
    """A worker of a rank that has nothing but its place among the calls."""
    said: list[str] = []
    made = RoleWorker.__new__(RoleWorker)
    made._is_commanded = False
    made.sensors = None
    cluster = SimpleNamespace(collective_s=wait_s)
    made.task = SimpleNamespace(config=SimpleNamespace(cluster=cluster))  # type: ignore[assignment]
    calls, workers = calls_at(store, number), {"learn": Worker(said)}
    made.state = SimpleNamespace(calls=calls, world=calls.world, follower=None, workers=workers)  # type: ignore[assignment]
    return made, said


def calls_at(store: Any, number: int) -> Calls:
    world = World(number, 2)
    world.store = store
    return Calls(world)


def calls_of(worker: RoleWorker) -> Calls:
    assert worker.state.calls is not None
    return worker.state.calls


def test_calls_are_heard_once_and_in_their_order() -> None:
    store = open_store()
    first, other = calls_at(store, 0), calls_at(store, 1)
    assert other.heard() is None
    heard = []
    for i in range(3 * KEPT_CALLS):
        first.call(f"learn:{i}")
        heard.append(other.heard())
    assert heard == [f"learn:{i}" for i in range(3 * KEPT_CALLS)] and other.heard() is None
    assert store.num_keys() <= KEPT_CALLS + 1


def test_an_order_waits_for_what_the_first_rank_called_before_it() -> None:
    store = open_store()
    (first, _), (other, said) = rank(store, 0), rank(store, 1)
    calls_of(first).call("learn:ready")
    first.begin(8, None)
    other.begin(8, None)  # comes while the call is still to be followed
    assert said == ["learn:ready", "begin 8"]


def test_nothing_that_the_first_rank_calls_after_an_order_is_done_before_the_order() -> None:
    store = open_store()
    (first, _), (other, said) = rank(store, 0), rank(store, 1)
    first.begin(8, None)
    calls_of(first).call("learn:finish")
    while other.follow():
        pass
    assert said == []  # the order has not come yet
    other.begin(8, None)
    assert other.follow()
    assert said == ["begin 8", "learn:finish"]


def test_an_order_that_the_first_rank_never_gets_is_a_failure_not_a_wait_for_ever() -> None:
    other, said = rank(open_store(), 1)
    with pytest.raises(CollectiveError, match="first rank"):
        other.begin(8, None)
    assert said == []
