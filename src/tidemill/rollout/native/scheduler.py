"""Who runs next: sequences in slots, prompts being read, requests waiting; and which pages each of them holds.

Host-side bookkeeping only. What changes every step is kept in arrays indexed by slot, so that a step costs a few array
operations and not a loop over sequences. A `Trunk` is a run of tokens to be read into the cache once, however many
samples branch off its end: a prompt with its n samples, or a half-made sample that goes on after a pause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tidemill.batch import Array
from tidemill.models.vision.eyes.eyes import Eyes
from tidemill.rollout.engine import Completion, Finish, Partial, Request, Top, token_limit
from tidemill.rollout.native.cache import PagePool
from tidemill.rollout.native.draw.sampling import is_steered, is_truncated, stream_key
from tidemill.rollout.native.scene import Scene, scene_of

OFF = 1 << 40  # a top-k that is more than any vocabulary


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request. The tokens it makes lie in its slot's arrays; the lists here hold those from before it
    last lost its slot."""

    request: Request
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[float] | None = None
    tops: list[Top] | None = None
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    shared: int = 0  # leading pages that others may hold too
    weights: int = 0  # that its pages began to be written with, as `PrefixIndex` counts
    spans: list[tuple[int, int]] = field(default_factory=list)  # (tokens made in this slot before, version from there)
    scene: Scene | None = None  # what its prompt shows

    def context(self) -> Array:
        """What is read to go on with it."""
        return np.array([*self.request.prompt, *self.tokens], np.int64)

    def identity(self) -> Array:
        """The same with images told apart."""
        made = self.context()
        if self.scene is not None:
            prompt = len(self.request.prompt)
            made[:prompt] = self.scene.identity[:prompt]
        return made

    def as_partial(self, cache: Kept | None = None) -> Partial:
        return Partial(self.request, self.index, self.tokens, self.logprobs, self.versions, self.kept, cache)

    def as_completion(self, finish: Finish, error: str | None = None, routes: Array | None = None) -> Completion:
        made = (self.tokens, self.logprobs, self.versions)
        return Completion(self.request, self.index, *made, finish, error, self.kept, routes, tops=self.tops)


@dataclass(slots=True, eq=False)
class Trunk:
    tokens: Array
    members: deque[Sequence]
    is_sole: bool  # one sample only: it takes the pages over
    pages: list[int] = field(default_factory=list)
    found: int = 0  # leading pages that were already cached
    done: int = 0  # tokens in the cache
    weights: int = 0  # that its pages began to be written with
    logits: Tensor | None = None  # after the last token, once all are read
    scene: Scene | None = None  # what the tokens show; None: text alone

    @property
    def identity(self) -> Array:
        """What tells its pages from those of others."""
        return self.tokens if self.scene is None else self.scene.identity


@dataclass(slots=True, eq=False)
class Kept:
    """The cache of a paused sample, held for when it goes on. Without pages it was given up, and is read again."""

    pages: list[int]
    shared: int
    length: int  # tokens in it
    weights: int


@dataclass(frozen=True, slots=True)
class Reading:
    """Tokens `first:last` of a trunk are read in this step."""

    trunk: Trunk
    first: int
    last: int


class Scheduler:
    def __init__(self, pool: PagePool, max_seqs: int, max_len: int, step_tokens: int, eyes: Eyes | None = None) -> None:
        self.pool = pool
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
        self.slots = _Slots(max_seqs, max_len, pool)
        self.changed = True  # rows or pages differ from the step before
        self.preemptions = 0
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.reading or self.ready or len(self.free_slots) < self.max_seqs)

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
            self.reading.append(trunk)
            self.promised += len(trunk.members)
            budget -= self._read(trunk, budget, readings)
        return readings

    def _read(self, trunk: Trunk, budget: int, readings: list[Reading]) -> int:
        count = min(budget, len(trunk.tokens) - trunk.done)
        if count > 0:
            count = count if trunk.scene is None else trunk.scene.whole(trunk.done, count)
            readings.append(Reading(trunk, trunk.done, trunk.done + count))
        return max(count, 0)

    def _admit_pages(self, trunk: Trunk) -> bool:
        size = self.pool.page_size
        needed = -(-len(trunk.tokens) // size) - len(trunk.pages)
        running = self.max_seqs - len(self.free_slots)
        is_busy = bool(running or self.reading or self.ready)
        # Room for a page more per running sequence, so that admitting does not at once preempt.
        reserve = running if is_busy else 0
        while self.pool.available < needed + reserve:
            if is_busy or not (self.give_up_kept() or self.give_up_resumed()):
                return False
            needed = -(-len(trunk.tokens) // size) - len(trunk.pages)  # its own may have been what was given up
        if trunk.pages:  # kept through a pause
            trunk.pages += [self.pool.take() for _ in range(needed)]
            return True
        trunk.pages = self.pool.index.find(trunk.identity)
        trunk.found = len(trunk.pages)
        trunk.done = trunk.found * size
        trunk.weights = self.pool.index.weights
        trunk.pages += [self.pool.take() for _ in range(needed - trunk.found)]
        return True

    def has_read(self, reading: Reading) -> bool:
        """Note that the tokens are cached; true when the trunk is complete."""
        trunk = reading.trunk
        trunk.done = reading.last
        if trunk.done < len(trunk.tokens):
            return False
        self.reading.remove(trunk)
        self.ready.append(trunk)
        return True

    def branch(self) -> tuple[list[tuple[Trunk, Sequence]], list[tuple[int, int]]]:
        """Give slots to samples of complete trunks. Also the page copies to make: a partly filled last page is private
        to each sample from here on."""
        born: list[tuple[Trunk, Sequence]] = []
        copies: list[tuple[int, int]] = []
        size = self.pool.page_size
        while self.ready and self.free_slots:
            trunk = self.ready[0]
            has_partial = len(trunk.tokens) % size != 0
            while trunk.members and self.free_slots:
                if has_partial and len(trunk.members) > 1 and not self._has_room_to_copy(trunk):
                    return born, copies
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
                        copies.append((trunk.pages[-1], sequence.pages[-1]))
                sequence.shared = trunk.found if trunk.is_sole else len(trunk.tokens) // size
                sequence.weights, sequence.scene = trunk.weights, trunk.scene
                self._seat(sequence, len(trunk.tokens))
                born.append((trunk, sequence))
            if not trunk.members:
                self.ready.popleft()
        return born, copies

    def _has_room_to_copy(self, trunk: Trunk) -> bool:
        """For one page more. When nobody runs who could give one back, paused samples do; and where there are none, one
        sample takes the trunk over and the others wait to read it again."""
        is_running = len(self.free_slots) < self.max_seqs
        while not self.pool.available:
            if is_running:
                return False
            if self.give_up_kept() or self.give_up_resumed():
                continue
            first = trunk.members.popleft()
            self.waiting.appendleft(Trunk(trunk.tokens, trunk.members, is_sole=False, scene=trunk.scene))
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

    def grow(self) -> list[Sequence]:
        """A page more for each sequence whose last one is full; the sequences that had to leave for it."""
        slots = self.slots
        preempted: list[Sequence] = []
        is_full = slots.length % self.pool.page_size == 0
        for slot in np.flatnonzero(slots.active & is_full & (slots.launched < slots.limit)).tolist():
            sequence = self.sequence[slot]
            if sequence is None or len(sequence.pages) * self.pool.page_size > slots.length[slot]:
                continue
            while not self.pool.available and sequence.slot >= 0:
                preempted.append(self._make_room())
            if sequence.slot >= 0:
                slots.add_page(slot, len(sequence.pages), self.pool.take(), sequence.pages)
                self.changed = True
        return preempted

    def _make_room(self) -> Sequence:
        """The youngest running sequence leaves; it is read again later."""
        active = np.flatnonzero(self.slots.active)
        youngest = self.sequence[int(active[np.argmax(self.slots.arrival[active])])]
        assert youngest is not None
        self.preempt(youngest)
        self.preemptions += 1
        return youngest

    def preempt(self, sequence: Sequence) -> None:
        self.slots.save(sequence)
        self.leave(sequence)
        self.add(self.trunk(deque([sequence]), is_sole=True), first=True)

    def leave(self, sequence: Sequence, *, remember: Array | None = None) -> None:
        """Free the slot and the pages; with `remember`, full pages stay findable by these tokens."""
        slot = sequence.slot
        if remember is not None:
            self.pool.index.remember(remember, sequence.pages, sequence.weights)
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
        trunk.logits = None
        self.promised -= len(trunk.members)

    def _let_go(self, trunk: Trunk) -> None:
        self.abandoned += trunk.pages
        for page in reversed(trunk.pages):
            self.pool.drop(page)
        trunk.pages = []
        trunk.done = trunk.found = 0

    def keep(self, sequence: Sequence) -> Kept:
        """Hold the pages of a sequence that is about to leave."""
        kept = Kept(list(sequence.pages), sequence.shared, int(self.slots.length[sequence.slot]), sequence.weights)
        for page in kept.pages:
            self.pool.hold(page)
        self.kept.append(kept)
        return kept

    def give_up_kept(self, which: Kept | None = None) -> bool:
        """Free the pages of one paused sample, the latest or this one; false where there is none."""
        if which is None and not self.kept:
            return False
        kept = which or self.kept[-1]
        if kept in self.kept:
            self.kept.remove(kept)
            for page in reversed(kept.pages):
                self.pool.drop(page)
            kept.pages = []
        return True

    def give_up_resumed(self) -> bool:
        """The same for the last sample in the queue that was paused with its pages; it is read again."""
        for trunk in reversed(self.waiting):
            if trunk.pages:
                self._let_go(trunk)
                return True
        return False

    def restart_reading(self) -> None:
        """Admitted trunks go back to the head of the queue, in order."""
        for trunk in reversed([*self.ready, *self.reading]):
            self._abandon(trunk)
            self.waiting.appendleft(trunk)
        self.ready.clear()
        self.reading.clear()

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

    def running(self) -> Iterator[Sequence]:
        return (sequence for sequence in self.sequence if sequence is not None)


class _Slots:
    """What a step needs of every sequence, one array per field, indexed by slot."""

    def __init__(self, max_seqs: int, max_len: int, pool: PagePool) -> None:
        n, pages = max_seqs, -(-max_len // pool.page_size)
        self.active = np.zeros(n, bool)
        self.arrival = np.zeros(n, np.int64)
        self.length = np.zeros(n, np.int64)  # tokens in the cache
        self.token = np.zeros(n, np.int64)  # the newest token, not in the cache yet
        self.made = np.zeros(n, np.int64)  # tokens made since the sequence was seated, as far as the host has seen
        self.launched = np.zeros(n, np.int64)  # the same, with those a device is still making
        self.before = np.zeros(n, np.int64)  # and before that
        self.limit = np.zeros(n, np.int64)  # of `made`
        self.key = np.zeros(n, np.int64)
        self.temperature = np.ones(n, np.float32)
        self.greedy = np.zeros(n, bool)
        self.top_k = np.zeros(n, np.int64)
        self.top_p = np.ones(n, np.float32)
        self.min_p = np.zeros(n, np.float32)
        self.truncated = np.zeros(n, bool)
        self.ignore_eos = np.zeros(n, bool)
        self.watched = np.zeros(n, bool)  # has stop tokens or strings of its own
        self.steered = np.zeros(n, bool)  # has penalties, bias, allowed tokens or a grammar
        self.guided = np.zeros(n, bool)  # has a grammar
        self.tops = np.zeros(n, np.int64)  # of each token so many of the likeliest ones are wanted
        self.stream = np.full(n, -1, np.int64)  # who hears of its tokens; -1: nobody
        self.shared = np.zeros(n, np.int64)
        self.shift = np.zeros(n, np.int64)  # from a place in the cache to the position that is turned by
        self.table = np.zeros((n, pages), np.int64)
        self.tokens = np.zeros((n, max_len), np.int32)
        self.logprobs = np.zeros((n, max_len), np.float32)
        self.kept = np.zeros((n, max_len), np.float32)
        # By page: the one slot that holds it as its own (-1: none), and the position of its first token.
        self.page_slot = np.full(pool.pages, -1, np.int64)
        self.page_start = np.zeros(pool.pages, np.int64)
        self.page_size = pool.page_size

    def seat(self, slot: int, sequence: Sequence, length: int, arrival: int) -> None:
        request, how = sequence.request, sequence.request.sampling
        self.active[slot] = True
        self.arrival[slot] = arrival
        self.length[slot] = length
        self.made[slot] = self.launched[slot] = 0
        self.before[slot] = len(sequence.tokens)
        left = token_limit(request, sequence.index) - len(sequence.tokens)
        self.limit[slot] = min(left, self.tokens.shape[1] - length)
        self.key[slot] = stream_key(how.seed, request.draws_as, sequence.index)
        self.greedy[slot] = how.temperature == 0
        self.temperature[slot] = how.temperature or 1.0
        # Off is written as a value that cannot cut anything, so rounding cannot either.
        self.top_k[slot] = min(how.top_k or OFF, OFF)
        self.top_p[slot] = how.top_p if how.top_p < 1 else 2.0
        self.min_p[slot] = how.min_p
        self.truncated[slot] = is_truncated(how)
        self.ignore_eos[slot] = how.ignore_eos
        self.watched[slot] = len(how.stop_tokens) > 0 or len(how.stop_strings) > 0
        self.steered[slot] = is_steered(how)
        self.guided[slot] = how.grammar is not None
        self.tops[slot] = how.top_logprobs
        self.stream[slot] = -1 if request.stream is None else request.stream + sequence.index
        self.shared[slot] = sequence.shared
        self.shift[slot] = 0 if sequence.scene is None else sequence.scene.shift
        pages = np.asarray(sequence.pages, np.int64)
        self.table[slot, : len(pages)] = pages
        own = pages[sequence.shared :]
        self.page_slot[own] = slot
        self.page_start[own] = np.arange(sequence.shared, len(pages)) * self.page_size

    def add_page(self, slot: int, place: int, page: int, pages: list[int]) -> None:
        pages.append(page)
        self.table[slot, place] = page
        self.page_slot[page] = slot
        self.page_start[page] = place * self.page_size

    def clear(self, slot: int, own: list[int]) -> None:
        self.active[slot] = False
        mine = np.asarray(own, np.int64)
        self.page_slot[mine] = -1

    def save(self, sequence: Sequence) -> None:
        """Move what the slot made into the sequence's own lists."""
        slot, made = sequence.slot, int(self.made[sequence.slot])
        sequence.tokens += self.tokens[slot, :made].tolist()
        sequence.logprobs += self.logprobs[slot, :made].tolist()
        ends = [*(start for start, _ in sequence.spans[1:]), made]
        for (start, version), end in zip(sequence.spans, ends):
            sequence.versions += [version] * (end - start)
        sequence.spans = []
        if sequence.kept is not None or self.truncated[slot]:
            sequence.kept = (sequence.kept or []) + self.kept[slot, :made].tolist()
        self.made[slot] = 0
        self.before[slot] = len(sequence.tokens)
