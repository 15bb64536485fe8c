"""Speculative decoding by lookup: what followed the same few tokens before, in the prompt, in the sample itself or in
others of its group, is tried as what comes next.

Drafted tokens go through the model together with the newest one. Each position then draws its token as it always does,
with its own random number; a draft is kept as far as it equals what was drawn. So a sample's tokens are those it would
have without speculation, whatever is drafted; only the number of passes changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tidemill.batch import Array
from tidemill.rollout.native.scheduler import Scheduler, Sequence

When = Literal["auto", "on", "off"]

# Tokens that must match before the next ones are taken over; most tokens drafted at once.
MATCH, MOST = 3, 6
# A pass takes about as long as reading the weights plus the arithmetic of its rows; measured on a CPU, the first is
# worth 13 rows for a model of 1 M parameters and about 20 for one of 60 M.
ROWS_OF_A_PASS = 16
# Without drafts nothing is learned about them: every so many passes a few rows try one token. Not a divisor of any page
# size, or the tries would all fall on the end of a page, where there is no room for them.
PROBE_EVERY, PROBE_ROWS = 13, 8
# How many drafted tokens an estimate of their worth remembers, and what it says before the first.
MEMORY, FIRST_GUESS, FIRST_WEIGHT = 256.0, 0.3, 8.0


@dataclass(frozen=True, slots=True)
class Drafts:
    """Of each row of a pass, how many tokens were drafted, and which."""

    count: Array  # (rows,)
    tokens: Array  # (rows, MOST)

    def spread(self, rows: Array, newest: Array) -> tuple[Array, Array, Array]:
        """One entry per token of the pass: its slot, the token, and how far it lies after the row's newest."""
        each = self.count + 1
        ahead = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
        ids = np.concatenate([newest[:, None], self.tokens], 1)
        return np.repeat(rows, each), ids[np.repeat(np.arange(len(rows)), each), ahead], ahead

    def accepted(self, drawn: Array) -> Array:
        """How many drafts of each row equal what was drawn; `drawn` has one token per entry of `spread`."""
        each = self.count + 1
        place = (np.cumsum(each) - each)[:, None] + np.arange(self.tokens.shape[1])
        inside = np.arange(self.tokens.shape[1]) < self.count[:, None]
        same = inside & (drawn[np.where(inside, place, 0)] == self.tokens)
        found: Array = np.cumprod(same, 1).sum(1)
        return found


@dataclass(slots=True)
class _Texts:
    """Prompt and responses of one request's samples, and where each run of MATCH tokens was last seen in them."""

    texts: dict[int, list[int]] = field(default_factory=dict)  # by sample
    last_seen: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)  # (sample, place after the run)
    ended: int = 0

    def extend(self, sample: int, tokens: list[int]) -> None:
        text = self.texts.setdefault(sample, [])
        first = max(len(text), MATCH)
        text += tokens
        for place in range(first, len(text)):
            self.last_seen[tuple(text[place - MATCH : place])] = (sample, place)

    def after(self, sample: int, most: int) -> list[int]:
        text = self.texts[sample]
        seen = self.last_seen.get(tuple(text[-MATCH:]))
        if seen is None:
            return []
        draft = self.texts[seen[0]][seen[1] : seen[1] + most]
        if seen[0] == sample:  # a loop: what was drafted goes on as it began
            draft = (draft * most)[:most]
        return draft


class Speculator:
    def __init__(self, when: When, scheduler: Scheduler) -> None:
        self.when, self.scheduler = when, scheduler
        self._texts: dict[int, _Texts] = {}
        self.drafted = self.kept = 0  # tokens, ever
        self.reset()

    def reset(self) -> None:
        """New weights: what was learned of drafts' worth is no longer true. Also makes a step's work depend on nothing
        before it, so that a resumed run repeats it."""
        self._tried, self._good = FIRST_WEIGHT, FIRST_WEIGHT * FIRST_GUESS
        self._passes = 0

    def propose(self, rows: Array) -> Drafts | None:
        self._passes += 1
        most, trying = self._most(len(rows)), rows
        if most == 0:
            if self._passes % PROBE_EVERY:
                return None
            most, trying = 1, rows[:PROBE_ROWS]
        count, tokens = np.zeros(len(rows), np.int64), np.zeros((len(rows), MOST), np.int64)
        for i, slot in enumerate(trying.tolist()):
            draft = self._draft(slot, most)
            count[i] = len(draft)
            tokens[i, : len(draft)] = draft
        return Drafts(count, tokens) if count.any() else None

    def _most(self, rows: int) -> int:
        """How many tokens to draft at most, so that the tokens made per time are the most to be expected."""
        if self.when == "on":
            return MOST
        chance = self._good / self._tried
        gain = np.cumsum(chance ** np.arange(MOST + 1))  # tokens a row makes with 0 … MOST drafts
        cost = ROWS_OF_A_PASS + rows * (1 + np.arange(MOST + 1))
        return int(np.argmax(gain / cost))

    def _draft(self, slot: int, most: int) -> list[int]:
        slots, sequence = self.scheduler.slots, self.scheduler.sequence[slot]
        if sequence is None or slots.steered[slot]:
            return []  # penalties look at tokens that a draft does not have yet
        length, size = int(slots.length[slot]), self.scheduler.pool.page_size
        room = min(len(sequence.pages) * size - length, int(slots.limit[slot] - slots.launched[slot])) - 1
        texts = self._texts.setdefault(sequence.request.id, _Texts())
        self._catch_up(texts, sequence)
        return texts.after(sequence.index, min(most, room)) if room > 0 else []

    def _catch_up(self, texts: _Texts, sequence: Sequence) -> None:
        prompt, slots = len(sequence.request.prompt), self.scheduler.slots
        if sequence.index not in texts.texts:
            texts.extend(sequence.index, list(sequence.request.prompt))
        known = len(texts.texts[sequence.index]) - prompt
        before, made = len(sequence.tokens), int(slots.made[sequence.slot])
        texts.extend(sequence.index, sequence.tokens[known:])
        fresh = slots.tokens[sequence.slot, max(known - before, 0) : made]
        texts.extend(sequence.index, fresh.tolist())

    def note(self, drafts: Drafts, accepted: Array) -> None:
        """What became of drafts. A draft counts until its first wrong token: those behind it were not judged."""
        good = float(accepted.sum())
        tried = good + float((accepted < drafts.count).sum())
        fade = max(0.0, 1 - tried / MEMORY)
        self._tried, self._good = self._tried * fade + tried, self._good * fade + good
        self.drafted += int(drafts.count.sum())
        self.kept += int(good)

    def ended(self, sequence: Sequence) -> None:
        """A sample is over: its text stays for the others of its request until the last one ends."""
        texts = self._texts.get(sequence.request.id)
        if texts is None:
            return
        texts.ended += 1
        if sequence.index in texts.texts:
            known = len(texts.texts[sequence.index]) - len(sequence.request.prompt)
            texts.extend(sequence.index, sequence.tokens[known:])
        if texts.ended >= sequence.request.n:
            del self._texts[sequence.request.id]

    def forget(self, request_id: int | None = None) -> None:
        if request_id is None:
            self._texts.clear()
        else:
            self._texts.pop(request_id, None)
