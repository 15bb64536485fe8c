"""What a step needs of every running sequence, as arrays by slot: a step costs a few array operations and no loop over
sequences."""

from __future__ import annotations

import numpy as np

from tidemill.rollout.engine import token_limit
from tidemill.rollout.native.batch.sequences import Sequence
from tidemill.rollout.native.draw.sampling import is_steered, is_truncated, stream_key
from tidemill.rollout.native.pages.cache import PagePool

OFF = 1 << 40  # a top-k that is more than any vocabulary


class Slots:
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
