"""The ledger against a plain model of itself, through random lives: puts, takes, commits, drops, expiries, restarts."""

from dataclasses import asdict, replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tidemill.dock import Counts, LeaseExpired, Want
from tidemill.dock.ledger import requeue as again
from tidemill.dock.ledger import snapshot
from tidemill.dock.ledger.leases import REMEMBERED_COMMITS, Committed
from tidemill.dock.ledger.ledger import Ledger
from tidemill.dock.ledger.records import Written
from tidemill.dock.ledger.table import LIVE
from tidemill.graph import Stage

STAGES = (
    Stage("make", "r", ("prompt",), ("tokens",)),
    Stage("score", "r", ("tokens",), ("reward",)),
    Stage("judge", "r", ("reward",), ("advantage",), scope="group"),
    Stage("learn", "r", ("tokens", "advantage")),
)
NAMES = [stage.name for stage in STAGES]
SIZE = 3


def new_ledger(epoch=1):
    return Ledger(STAGES, lease_s=10, epoch=epoch)


class LedgerLife(RuleBasedStateMachine):
    """`consumed[stage]`: every id that the stage has committed. Never one twice, never one lost."""

    @initialize()
    def start(self):
        self.ledger = new_ledger()
        self.ledger.effects = []
        self.history = []
        self.now = 0.0
        self.leases = []
        self.put_ids, self.ended = set(), set()
        self.consumed = {name: set() for name in NAMES}
        self.counted = {name: set() for name in NAMES}  # ids that an accepted commit counted
        self.told, self.heard = dict.fromkeys(NAMES, 0.0), 0
        self.chunk = 0
        self.alive_chunks = set()

    def written(self, *columns, n):
        self.chunk += 1
        self.alive_chunks.add(self.chunk)
        score = np.zeros(n, np.float32) if "reward" in columns else None
        return Written(columns, self.chunk, 10, score=score)

    @rule(group=st.integers(0, 5), again=st.booleans())
    def put(self, group, again):
        ids = np.arange(group * SIZE, group * SIZE + (SIZE if again else 2))
        what = self.written("prompt", n=len(ids))
        n = self.ledger.put(ids, ids // SIZE, np.full(len(ids), SIZE), what, "", self.now)
        assert n == len(set(ids.tolist()) - self.put_ids)
        self.put_ids |= set(ids.tolist())

    @rule(
        stage=st.sampled_from(NAMES),
        rows=st.integers(1, 5),
        sampler=st.sampled_from(["fifo", "oldest"]),
        tag=st.sampled_from([None, None, "", "kept"]),
    )
    def take(self, stage, rows, sampler, tag):
        grant = self.ledger.take(stage, Want(rows=rows, groups=2, sampler=sampler, tag=tag), self.now)
        if grant is None:
            return
        grant = grant.owned()
        ids = grant.ids.tolist()
        held = {i for other, s, d in self.leases if s == stage and d > self.now for i in other.ids.tolist()}
        assert not held & set(ids), "leased twice"
        assert not self.consumed[stage] & set(ids), "given after it was consumed"
        if stage == "judge":
            for key in set(grant.group.tolist()):
                whole = {i for i in self.put_ids if i // SIZE == key}
                assert len(whole) == SIZE and whole - self.ended <= set(ids), "a group in parts"
        if tag is not None:
            slots = [self.ledger.slot_of[i] for i in ids]
            assert {self.ledger.tags[t] for t in self.ledger.rows.tag[slots]} == {tag}
        for piece in grant.pieces:
            assert set(piece.keys) <= self.alive_chunks, (piece.part, "bytes freed too early")
        self.leases.append((grant, stage, self.now + 10))

    @rule(data=st.data(), dropped=st.integers(0, 2))
    def commit(self, data, dropped):
        if not self.leases:
            return
        grant, stage, deadline = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        ids = grant.ids.tolist()
        writes = STAGES[NAMES.index(stage)].writes
        what = self.written(*writes, n=len(ids)) if writes else Written()
        what = replace(what, counts=Counts({stage: [1.0] * len(ids)}, {}))
        drop = ids[:dropped]
        try:
            self.ledger.commit(grant.lease, what, drop, self.now)
        except LeaseExpired:
            assert deadline <= self.now or grant.lease >> 40 != self.ledger.leases.epoch
            self.alive_chunks.discard(what.chunk)
            return
        assert deadline > self.now
        kept = set(ids) - set(drop) - self.ended
        assert not kept & self.consumed[stage], "committed twice"
        self.consumed[stage] |= kept
        self.ended |= set(drop)
        assert not self.counted[stage] & set(ids), "counted twice"
        self.counted[stage] |= set(ids)

    @rule(is_heard=st.booleans())
    def tell(self, is_heard):
        told = self.ledger.tell(self.heard)
        if is_heard:
            self.hear(told)

    def hear(self, told):
        self.heard = told.number
        for name, count in told.sums.items():
            self.told[name] += count
        slots = self.ledger.slot_of
        here = {i for i, slot in slots.items() if self.ledger.rows.state[slot] == LIVE}
        assert self.told == {name: len(ids - here) for name, ids in self.counted.items()}

    @rule(groups=st.sets(st.integers(0, 5), max_size=3), tag=st.sampled_from(["", "kept", "taken"]))
    def retag(self, groups, tag):
        self.ledger.retag(groups, tag)
        rows, live = self.ledger.rows, self.live()
        tags = {int(i): self.ledger.tags[t] for i, t in zip(rows.id[live], rows.tag[live])}
        assert all(t == tag for i, t in tags.items() if i // SIZE in groups)
        for name in NAMES:
            through = self.consumed[name] | self.ended
            for other in ("", "kept", "taken"):
                # A row that is put after its group got another tag has its own; such a group has no tag whole.
                others = {i // SIZE for i, t in tags.items() if t != other}
                of_tag = {i // SIZE for i in tags} - others
                whole = sorted(g for g in of_tag if through.issuperset(self.ids_of(g)))
                assert self.ledger.finished(name, other) == whole
                pending = [i for i in self.here() - self.consumed[name] if tags[i] == other]
                assert self.ledger.progress(name, other).pending == len(pending)

    def live(self):
        return np.flatnonzero(self.ledger.rows.state == LIVE)

    def here(self):
        return set(self.ledger.rows.id[self.live()].tolist())

    def ids_of(self, group):
        return range(group * SIZE, (group + 1) * SIZE)

    @rule()
    def abandon(self):
        if self.leases:
            self.ledger.abandon(self.leases.pop()[0].lease)

    @rule(seconds=st.sampled_from([1, 6, 11]))
    def time_passes(self, seconds):
        self.now += seconds
        self.ledger.expire(self.now)

    @rule(from_journal=st.booleans())
    def restart(self, from_journal):
        other = new_ledger(self.ledger.leases.epoch + 1)
        if from_journal:
            for effect in self.history:
                again.redo(other, effect)
        else:
            snapshot.load(other, *snapshot.dump(self.ledger))
        other.chunks.freed.clear()
        assert other.slot_of.keys() == {i for i, s in self.ledger.slot_of.items() if self.ledger.rows.state[s] == 1}
        self.ledger, other.effects = other, []
        self.leases = [(grant, stage, -1.0) for grant, stage, _ in self.leases]

    @invariant()
    def books_balance(self):
        if not hasattr(self, "ledger"):
            return
        for effect in self.ledger.effects:
            self.history.append(tuple(asdict(x) if isinstance(x, Written) else x for x in effect))
        self.ledger.effects = []
        for key in self.ledger.chunks.freed:
            self.alive_chunks.discard(key)
        self.ledger.chunks.freed.clear()
        assert {key for key, _ in self.ledger.chunks.items()} <= self.alive_chunks
        state = self.ledger.state(self.now)
        here = set(self.ledger.slot_of)
        through = set.intersection(*self.consumed.values())
        assert here | self.ended | through == self.put_ids, "a row is lost"
        for name in NAMES:
            assert state.stages[name].done == len(self.consumed[name])
        if not here:
            assert state.bytes == 0

    def teardown(self):
        """Left alone, every row must still get through."""
        if not hasattr(self, "ledger"):
            return
        self.now += 100
        self.ledger.expire(self.now)
        for group in range(6):
            ids = np.arange(group * SIZE, group * SIZE + SIZE)
            self.ledger.put(ids, ids // SIZE, np.full(SIZE, SIZE), self.written("prompt", n=SIZE), "", self.now)
            self.put_ids |= set(ids.tolist())
        for stage in STAGES:
            while grant := self.ledger.take(stage.name, Want(rows=100, groups=100), self.now):
                ids = grant.ids.tolist()
                what = self.written(*stage.writes, n=len(ids)) if stage.writes else Written()
                self.ledger.commit(grant.lease, what, (), self.now)
                assert not self.consumed[stage.name] & set(ids)
                self.consumed[stage.name] |= set(ids)
        assert self.ledger.state(self.now).rows == 0, "a row got stuck"
        assert self.ledger.chunks.nbytes == 0
        self.hear(self.ledger.tell(self.heard))


LedgerLife.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedgerLife = LedgerLife.TestCase


def test_the_newest_commits_are_known_again_and_their_memory_is_taken_at_the_start() -> None:
    known = Committed()
    for key in range(REMEMBERED_COMMITS + 10):
        known.add(key)
    assert 9 not in known and 10 in known and REMEMBERED_COMMITS + 9 in known and REMEMBERED_COMMITS + 10 not in known
    again = Committed()
    again.load(known.dump())
    assert again.dump().tolist() == known.dump().tolist() == list(range(10, REMEMBERED_COMMITS + 10))
