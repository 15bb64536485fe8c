"""Who runs next: sequences in slots, prompts being read, requests waiting; and which pages each of them holds.

Host-side bookkeeping only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from tidemill.batch import Array
from tidemill.models.vision.eyes.eyes import Eyes
from tidemill.rollout.native.batch.prefixes import StatePrefixes
from tidemill.rollout.native.batch.sequences import Kept, Reading, Sequence, Trunk
from tidemill.rollout.native.batch.slots import Slots
from tidemill.rollout.native.pages.cache import PagePool
from tidemill.rollout.native.pages.host import FromHost, HostPool, Move, PageCopy, ToHost
from tidemill.rollout.native.pages.states import Hand
from tidemill.rollout.native.scene import scene_of


class Scheduler:
    """`has_states`: a sequence cannot be gone on from its pages alone."""

    def __init__(
        self,
        pool: PagePool,
        max_seqs: int,
        max_len: int,
        step_tokens: int,
        eyes: Eyes | None = None,
        has_states: bool = False,
    ) -> None:
        self.pool = pool
        self.prefixes = StatePrefixes(pool, max_seqs) if has_states else None
        self.host = HostPool(pool)
        self.moves: list[Move] = []  # of pages, to be made in this order before the next pass
        self.eyes = eyes
        self.max_seqs = max_seqs
        self.max_len = max_len
        self.step_tokens = step_tokens
        self.waiting: deque[Trunk] = deque()
        self.reading: list[Trunk] = []
        self.ready: deque[Trunk] = deque()  # read to the end, some samples not branched off yet
        self.kept: list[Kept] = []  # of paused samples
        self.abandoned: list[int] = []  # pages of trunks that were not read to the end, or not gone on from
        self.sequence: list[Sequence | None] = [None] * max_seqs
        self.free_slots = list(range(max_seqs - 1, -1, -1))
        self.promised = 0  # slots that samples of admitted trunks will take
        self.slots = Slots(max_seqs, max_len, pool)
        self.changed = True  # rows or pages differ from the step before
        self.preemptions = 0
        self.recomputed = 0  # tokens whose keys and values made room for others' and had no place on the host
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.reading or self.ready or len(self.free_slots) < self.max_seqs)

    def counts(self) -> dict[str, int]:
        """What came of a cache that was full, by the names of metrics."""
        return {"preempted_samples": self.preemptions, "recomputed_tokens": self.recomputed}

    # -- entering ------------------------------------------------------------------------------------------------

    def trunk(self, members: deque[Sequence], *, is_sole: bool) -> Trunk:
        """What these samples of a request, which have made the same so far, are read as."""
        tokens = members[0].context()
        return Trunk(tokens, members, is_sole, scene=scene_of(tokens, members[0].request.tiles, self.eyes))

    def add(self, trunk: Trunk, *, first: bool = False) -> None:
        (self.waiting.appendleft if first else self.waiting.append)(trunk)

    def admit(self) -> list[Reading]:
        """Which prompt tokens to read in this step, beside one token for each running sequence."""
        budget = self.step_tokens - (self.max_seqs - len(self.free_slots))
        readings: list[Reading] = []
        for trunk in self.reading:
            budget -= self._read(trunk, budget, readings)
        while budget > 0 and self.waiting and len(self.free_slots) > self.promised:
            trunk = self.waiting[0]
            if not self._admit_pages(trunk):
                break
            self.waiting.popleft()
            self.promised += len(trunk.members)
            if trunk.done == len(trunk.tokens):  # it was read to the end before it made room
                self.ready.append(trunk)
                continue
            self.reading.append(trunk)
            budget -= self._read(trunk, budget, readings)
        return readings

    def _read(self, trunk: Trunk, budget: int, readings: list[Reading]) -> int:
        count = min(budget, len(trunk.tokens) - trunk.done)
        if count > 0:
            count = count if trunk.scene is None else trunk.scene.whole(trunk.done, count)
            readings.append(Reading(trunk, trunk.done, trunk.done + count))
        return max(count, 0)

    def _admit_pages(self, trunk: Trunk) -> bool:
        running = self.max_seqs - len(self.free_slots)
        is_busy = bool(running or self.reading or self.ready)
        # Room for a page more per running sequence, so that admitting does not at once preempt.
        reserve = running if is_busy else 0
        while self._is_short(self._needed(trunk) + reserve):
            # Its own may be what is given up.
            if is_busy or not (self.give_up_kept() or self.give_up_resumed()):
                return False
        tail = None
        if trunk.kept is None:
            tail = self._find(trunk)
        else:
            self._go_on(trunk, trunk.kept)
        held = len(trunk.pages)
        trunk.pages += [self.pool.take() for _ in range(self._pages_of(len(trunk.tokens)) - held)]
        if tail is not None:
            self._copy(tail, trunk.pages[held])
        return True

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.pool.page_size)

    def _needed(self, trunk: Trunk) -> int:
        """Pages beside those that it keeps, or that others have for it."""
        kept, needed = trunk.kept, self._pages_of(len(trunk.tokens))
        if kept is None:
            return needed
        return needed - (len(kept.pages) if kept.copy is None else self.host.held_still(kept.copy))

    def _go_on(self, trunk: Trunk, kept: Kept) -> None:
        """Give a trunk what it kept of the cache."""
        trunk.kept = None
        trunk.pages, trunk.hand = kept.pages, kept.hand
        trunk.found, trunk.done, trunk.weights = kept.shared, kept.length, kept.weights
        if kept.copy is not None:
            trunk.pages, copied = self.host.bring_back(kept.copy, kept.shared)
            rows, pages = ([pair[side] for pair in copied] for side in (0, 1))
            self.moves.append(FromHost(rows, pages, kept.copy.state, trunk.hand))

    def _copy(self, source: int, target: int) -> None:
        if not self.moves or not isinstance(self.moves[-1], PageCopy):
            self.moves.append(PageCopy([], []))
        latest = self.moves[-1]
        assert isinstance(latest, PageCopy)
        latest.source.append(source)
        latest.target.append(target)

    def _find(self, trunk: Trunk) -> int | None:
        """Let a trunk begin with what is known of it already; a page that it is to have a copy of, if there is one."""
        trunk.weights = self.pool.index.weights
        tail = None
        if self.prefixes is None:
            trunk.pages = self.pool.index.find(trunk.identity)
            trunk.done = len(trunk.pages) * self.pool.page_size
        elif (known := self.prefixes.find(trunk.identity)) is not None:
            trunk.pages, trunk.done, trunk.hand = known.pages, known.length, dict(known.hand)
            tail = known.tail
        trunk.found = len(trunk.pages)
        return tail

    def _is_short(self, pages: int) -> bool:
        """Of so many pages, also when all that is only remembered is forgotten."""
        while self.pool.available < pages:
            if self.prefixes is None or not self.prefixes.forget_oldest():
                return True
        return False

    def has_read(self, reading: Reading) -> bool:
        """Note that the tokens are cached; true when the trunk is complete."""
        trunk = reading.trunk
        trunk.done = reading.last
        if trunk.done < len(trunk.tokens):
            return False
        self.reading.remove(trunk)
        self.ready.append(trunk)
        return True

    def branch(self) -> list[tuple[Trunk, Sequence]]:
        """Give slots to samples of complete trunks. A partly filled last page is private to each from here on."""
        born: list[tuple[Trunk, Sequence]] = []
        size = self.pool.page_size
        while self.ready and self.free_slots:
            trunk = self.ready[0]
            has_partial = len(trunk.tokens) % size != 0
            while trunk.members and self.free_slots:
                if has_partial and len(trunk.members) > 1 and not self._has_room_to_copy(trunk):
                    return born
                takes_over = len(trunk.members) == 1
                sequence = trunk.members.popleft()
                self.promised -= 1
                sequence.pages = list(trunk.pages)
                if not takes_over:
                    full = len(trunk.tokens) // size
                    for page in trunk.pages[:full]:
                        self.pool.hold(page)
                    if has_partial:
                        sequence.pages[-1] = self.pool.take()
                        self._copy(trunk.pages[-1], sequence.pages[-1])
                sequence.shared = trunk.found if trunk.is_sole else len(trunk.tokens) // size
                sequence.weights, sequence.scene = trunk.weights, trunk.scene
                self._seat(sequence, len(trunk.tokens))
                born.append((trunk, sequence))
            if not trunk.members:
                self.ready.popleft()
        return born

    def _has_room_to_copy(self, trunk: Trunk) -> bool:
        """For one page more. When nobody runs who could give one back, paused samples do; and where there are none, one
        sample takes the trunk over and the others wait to go on from a copy, or to read it again."""
        is_running = len(self.free_slots) < self.max_seqs
        while self._is_short(1):
            if is_running:
                return False
            if self.give_up_kept() or self.give_up_resumed():
                continue
            first = trunk.members.popleft()
            rest = Trunk(trunk.tokens, trunk.members, is_sole=False, scene=trunk.scene)
            rest.kept = self._moved(self._kept_of(trunk))
            rest.logits = trunk.logits if rest.kept is not None else None
            self.waiting.appendleft(rest)
            self.promised -= len(trunk.members)
            trunk.members = deque([first])
            return True
        return True

    def _seat(self, sequence: Sequence, length: int) -> None:
        slot = self.free_slots.pop()
        sequence.slot = slot
        self.sequence[slot] = sequence
        self._arrivals += 1
        self.slots.seat(slot, sequence, length, self._arrivals)
        self.changed = True

    # -- running -------------------------------------------------------------------------------------------------

    def grow(self, settle: Callable[[], None] = lambda: None) -> None:
        """A page more for each sequence whose last one is full; where there is none, sequences leave for it. `settle`
        waits for tokens that a device is still making: what leaves has all of its own, and some may end by them."""
        slots = self.slots
        is_full = slots.length % self.pool.page_size == 0
        for slot in np.flatnonzero(slots.active & is_full & (slots.launched < slots.limit)).tolist():
            sequence = self.sequence[slot]
            if sequence is None or len(sequence.pages) * self.pool.page_size > slots.length[slot]:
                continue
            if self._is_short(1):
                settle()
            while sequence.slot >= 0 and self._is_short(1):
                self._make_room()
            if sequence.slot >= 0:
                slots.add_page(slot, len(sequence.pages), self.pool.take(), sequence.pages)
                self.changed = True

    def _make_room(self) -> None:
        """The youngest running sequence leaves."""
        active = np.flatnonzero(self.slots.active)
        youngest = self.sequence[int(active[np.argmax(self.slots.arrival[active])])]
        assert youngest is not None
        self.preempt(youngest)
        self.preemptions += 1

    def preempt(self, sequence: Sequence, *, keeps: bool = True) -> None:
        """It goes on later: with its cache where the host has room for it, else it is read again. Without `keeps` it is
        read again in any case."""
        slots, slot = self.slots, sequence.slot
        length = int(slots.length[slot])
        kept = Kept(sequence.pages[: self._pages_of(length)], sequence.shared, length, sequence.weights, {})
        moved = self._moved(kept, slot) if keeps else None
        slots.save(sequence)
        self.leave(sequence)
        trunk = self.trunk(deque([sequence]), is_sole=True)
        trunk.kept = moved
        self.add(trunk, first=True)

    def _moved(self, kept: Kept, slot: int = -1) -> Kept | None:
        """The same in host memory, states from the slot if there is one; None where there is no room. Who holds the
        pages lets go of them then."""
        found = self.host.put(kept.pages, kept.shared)
        if found is None:
            self.recomputed += kept.length
            return None
        copy, copied = found
        pages, rows = ([pair[side] for pair in copied] for side in (0, 1))
        self.moves.append(ToHost(pages, rows, copy.state, slot, kept.hand))
        return Kept([], kept.shared, kept.length, kept.weights, {}, copy)

    def _kept_of(self, trunk: Trunk) -> Kept:
        """What an admitted trunk has of the cache. Samples that it has several of share whole pages."""
        shared = trunk.found if trunk.is_sole else trunk.done // self.pool.page_size
        return Kept(trunk.pages[: self._pages_of(trunk.done)], shared, trunk.done, trunk.weights, trunk.hand)

    def leave(self, sequence: Sequence, *, remember: Array | None = None, hand: Hand | None = None) -> None:
        """Free the slot and the pages; with `remember`, full pages stay findable by these tokens, and `hand` with them:
        the states after them."""
        slot = sequence.slot
        if remember is not None:
            self.pool.index.remember(remember, sequence.pages, sequence.weights)
            if self.prefixes is not None and hand is not None and sequence.weights == self.pool.index.weights:
                self.prefixes.remember(remember, sequence.pages, hand)
        self.slots.clear(slot, sequence.pages[sequence.shared :])
        for page in reversed(sequence.pages):  # the end of a text is forgotten first: no page is found without its past
            self.pool.drop(page)
        sequence.pages = []
        sequence.shared = 0
        sequence.slot = -1
        self.sequence[slot] = None
        self.free_slots.append(slot)
        self.changed = True

    def _abandon(self, trunk: Trunk) -> None:
        """Forget what was read of an admitted trunk: its pages go back."""
        self._let_go(trunk)
        self.promised -= len(trunk.members)

    def _let_go(self, trunk: Trunk) -> None:
        self.abandoned += trunk.pages
        for page in reversed(trunk.pages):
            self.pool.drop(page)
        trunk.pages = []
        trunk.done = trunk.found = 0
        trunk.hand = {}
        trunk.logits = None
        if trunk.kept is not None:
            self.abandoned += trunk.kept.pages
            self._drop(trunk.kept)
            trunk.kept = None

    def keep(self, sequence: Sequence, hand: Hand) -> Kept:
        """Hold the pages of a sequence that is about to leave, and its states."""
        length = int(self.slots.length[sequence.slot])
        kept = Kept(list(sequence.pages), sequence.shared, length, sequence.weights, hand)
        for page in kept.pages:
            self.pool.hold(page)
        self.kept.append(kept)
        return kept

    def release(self, kept: Kept) -> None:
        """Free what a paused sample keeps, unless it has gone on."""
        if kept in self.kept:
            self.kept.remove(kept)
            self._drop(kept)

    def give_up_kept(self) -> bool:
        """Free the pages of one paused sample, the latest that has some; false where there is none."""
        for kept in reversed(self.kept):
            if kept.pages:
                self._give_up(kept)
                return True
        return False

    def give_up_resumed(self) -> bool:
        """The same for the last sample in the queue that was paused with its pages."""
        for trunk in reversed(self.waiting):
            if trunk.kept is not None and trunk.kept.pages:
                self.abandoned += trunk.kept.pages
                self._give_up(trunk.kept)
                if trunk.kept.copy is None:
                    trunk.kept = None
                return True
        return False

    def _give_up(self, kept: Kept) -> None:
        """Free its pages; the host takes them where it has room."""
        moved = self._moved(replace(kept, pages=kept.pages[: self._pages_of(kept.length)]))
        self._drop(kept)
        kept.copy = None if moved is None else moved.copy

    def _drop(self, kept: Kept) -> None:
        for page in reversed(kept.pages):
            self.pool.drop(page)
        if kept.copy is not None:
            self.host.drop(kept.copy)
        kept.pages, kept.hand, kept.copy = [], {}, None

    def vacate(self, *, keeps: bool) -> None:
        """Nobody has a slot; with `keeps` the host takes what it has room for, else all is read again."""
        for sequence in sorted(self.running(), key=lambda s: -int(self.slots.arrival[s.slot])):
            self.preempt(sequence, keeps=keeps)
        self.restart_reading(keeps=keeps)
        for trunk in () if keeps else self.waiting:
            self._let_go(trunk)

    def restart_reading(self, *, keeps: bool = False) -> None:
        """Admitted trunks go back to the head of the queue, in order. Without `keeps` they are read from the start,
        and no logits of before are drawn from."""
        for trunk in () if keeps else self.waiting:
            if trunk.logits is not None:
                self._let_go(trunk)
        for trunk in reversed([*self.ready, *self.reading]):
            moved = self._moved(self._kept_of(trunk)) if keeps and trunk.done else None
            logits = trunk.logits if moved is not None else None
            self._abandon(trunk)
            trunk.kept, trunk.logits = moved, logits
            self.waiting.appendleft(trunk)
        self.ready.clear()
        self.reading.clear()

    def keep_waiting(self) -> dict[int, Kept]:
        """What samples in the queue keep of the cache stays theirs through a pause; by the sample's `id`."""
        found = {}
        for trunk in self.waiting:
            if trunk.kept is not None and trunk.is_sole:
                found[id(trunk.members[0])] = trunk.kept
                self.kept.append(trunk.kept)
                trunk.kept = None
        return found

    def remove(self, request_id: int | None) -> list[Sequence]:
        """Take a request's samples that have no slot out of every queue; None: everybody's."""
        removed: list[Sequence] = []
        for queue in (self.ready, self.reading, self.waiting):
            for trunk in [t for t in queue if request_id is None or t.members[0].request.id == request_id]:
                queue.remove(trunk)
                if queue is not self.waiting:
                    self._abandon(trunk)
                self._let_go(trunk)  # what it kept through a pause, where it was not admitted yet
                removed += trunk.members
        return removed

    def forget(self) -> None:
        """New weights, or no cache: what was remembered is no longer true."""
        self.pool.index.forget_all()
        if self.prefixes is not None:
            self.prefixes.forget_all()

    def running(self) -> Iterator[Sequence]:
        return (sequence for sequence in self.sequence if sequence is not None)
