"""Groups go whole to whoever has most room, once, whatever joins, leaves or lags."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidemill.rollout.router import LEAST_FINISHED, MOST_COPIES, Issue, Router


def router(**rooms: int) -> Router:
    made = Router()
    for name, room in rooms.items():
        made.join(name, room)
    return made


def test_a_group_goes_whole_to_the_replica_with_most_room() -> None:
    r = router(a=8, b=16)
    r.submit(1, 8)
    assert r.issue(0.0) == [Issue("b", 1)]
    r.submit(2, 8)
    r.submit(3, 8)
    assert r.issue(0.0) == [Issue("a", 2), Issue("b", 3)]
    r.submit(4, 1)
    assert r.issue(0.0) == []


def test_a_group_larger_than_any_replica_gets_an_empty_one() -> None:
    r = router(a=4, b=4)
    r.submit(1, 2)
    r.submit(2, 9)
    assert r.issue(0.0) == [Issue("a", 1), Issue("b", 2)]
    r.submit(3, 9)
    assert r.issue(0.0) == []
    assert r.finished("a", 1, 1.0) == (True, [])
    assert r.issue(1.0) == [Issue("a", 3)]


def test_a_small_group_does_not_overtake_a_large_one_that_waits() -> None:
    r = router(a=8)
    for group, samples in ((1, 6), (2, 8), (3, 1)):
        r.submit(group, samples)
    assert r.issue(0.0) == [Issue("a", 1)]
    r.finished("a", 1, 1.0)
    assert r.issue(1.0) == [Issue("a", 2)]


def test_what_a_lost_replica_had_is_first_in_line_elsewhere() -> None:
    r = router(a=8, b=8)
    for group in range(4):
        r.submit(group, 8)
    assert r.issue(0.0) == [Issue("a", 0), Issue("b", 1)]
    assert r.lose("a") == [0]
    r.finished("b", 1, 1.0)
    assert r.issue(1.0) == [Issue("b", 0)]
    assert r.finished("a", 0, 2.0) == (False, []), "a dead replica's late answer does not count"


def test_a_leaving_replica_ends_what_it_has_and_gets_nothing_new() -> None:
    r = router(a=8, b=4)
    r.submit(1, 4)
    assert r.issue(0.0) == [Issue("a", 1)]
    r.leave("a")
    r.submit(2, 4)
    r.submit(3, 4)
    assert r.issue(0.0) == [Issue("b", 2)]
    assert r.finished("a", 1, 1.0) == (True, [])
    assert "a" not in r.replicas


def test_a_straggler_is_issued_once_more_and_the_first_to_end_wins() -> None:
    r = router(a=8, b=8)
    r.submit(99, 8)
    assert r.issue(0.0) == [Issue("a", 99)]
    for group in range(LEAST_FINISHED):
        r.submit(group, 8)
        assert r.issue(float(group)) == [Issue("b", group)]
        r.finished("b", group, group + 1.0)
    assert r.issue(LEAST_FINISHED + 1.0) == [Issue("b", 99)]
    assert r.issue(100.0) == [], "two copies are enough"
    assert r.finished("b", 99, 10.0) == (True, [Issue("a", 99, is_stop=True)])
    assert r.finished("a", 99, 11.0) == (False, [])
    assert r.room("a") == r.room("b") == 8


def test_no_straggler_is_copied_while_others_wait_for_the_room() -> None:
    r = router(a=8, b=8)
    r.submit(99, 8)
    r.issue(0.0)
    for group in range(LEAST_FINISHED + 3):
        r.submit(group, 8)
    issued = r.issue(0.0)
    for step in range(1, LEAST_FINISHED + 3):
        r.finished("b", issued[-1].group, float(step))
        issued = r.issue(float(step))
        assert issued[0].group != 99


class AnyLife(RuleBasedStateMachine):
    """Whatever happens in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.now, self.next_group, self.next_replica = Router(late_factor=1.5), 0.0, 0, 0
        self.running: set[tuple[str, int]] = set()
        self.done: set[int] = set()
        self.size: dict[int, int] = {}
        self.widths: dict[str, int] = {}

    @rule(room=st.integers(1, 12))
    def join(self, room: int) -> None:
        name = f"r{self.next_replica}"
        self.next_replica += 1
        self.widths[name] = room
        self.router.join(name, room)

    @precondition(lambda self: self.router.replicas)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.router.replicas)))
        self.router.lose(name)
        self.running = {(r, g) for r, g in self.running if r != name}

    @precondition(lambda self: self.router.replicas)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.router.leave(data.draw(st.sampled_from(sorted(self.router.replicas))))

    @rule(samples=st.integers(1, 8))
    def submit(self, samples: int) -> None:
        self.size[self.next_group] = samples
        self.router.submit(self.next_group, samples)
        self.next_group += 1

    @rule(pause=st.floats(0, 5))
    def issue(self, pause: float) -> None:
        self.now += pause
        before = dict.fromkeys(g for _, g in self.running)
        for issue in self.router.issue(self.now):
            assert issue.replica in self.router.replicas and (issue.replica, issue.group) not in self.running
            assert issue.group not in self.done
            self.running.add((issue.replica, issue.group))
        fresh = [g for g in dict.fromkeys(g for _, g in sorted(self.running, key=lambda p: p[1])) if g not in before]
        assert fresh == sorted(fresh)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), pause=st.floats(0, 5))
    def finish(self, data: st.DataObject, pause: float) -> None:
        self.now += pause
        replica, group = data.draw(st.sampled_from(sorted(self.running)))
        counts, stops = self.router.finished(replica, group, self.now)
        assert counts and group not in self.done
        self.done.add(group)
        others = {(r, g) for r, g in self.running if g == group and r != replica}
        assert {(s.replica, s.group) for s in stops} == others and all(s.is_stop for s in stops)
        self.running -= others | {(replica, group)}

    @invariant()
    def nothing_is_lost_and_nobody_is_overfull(self) -> None:
        waiting = list(self.router.waiting)
        assert len(waiting) == len(set(waiting))
        assert set(waiting) | {g for _, g in self.running} | self.done == set(range(self.next_group))
        assert not set(waiting) & {g for _, g in self.running}
        for name in self.router.replicas:
            own = [g for r, g in self.running if r == name]
            assert sum(self.size[g] for g in own) <= self.widths[name] or len(own) == 1
        for group in {g for _, g in self.running}:
            assert len([1 for _, g in self.running if g == group]) <= MOST_COPIES


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@settings(max_examples=50, deadline=None)
@given(rooms=st.lists(st.integers(1, 16), min_size=1, max_size=6), sizes=st.lists(st.integers(1, 8), max_size=40))
def test_everything_gets_made_when_replicas_keep_finishing(rooms: list[int], sizes: list[int]) -> None:
    r = Router()
    for i, room in enumerate(rooms):
        r.join(str(i), room)
    for group, samples in enumerate(sizes):
        r.submit(group, samples)
    running, rounds = list(r.issue(0.0)), 0
    while running:
        first = running.pop(0)
        r.finished(first.replica, first.group, float(rounds))
        rounds += 1
        running += [i for i in r.issue(float(rounds)) if not i.is_stop]
    assert not r.groups and not r.waiting


def test_joining_again_is_coming_back_empty() -> None:
    r = router(a=8)
    r.submit(1, 8)
    r.issue(0.0)
    r.join("a", 4)
    assert list(r.waiting) == [1] and r.room("a") == 4
    with pytest.raises(KeyError):
        r.leave("b")
