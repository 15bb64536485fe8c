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
from tidemill.errors import ConfigError
from tidemill.rollout.engine import Request
from tidemill.rollout.native.batch.scheduler import Scheduler
from tidemill.rollout.native.batch.sequences import Sequence
from tidemill.rollout.native.draw.sampling import Drawn
from tidemill.rollout.native.pending import Pending

When = Literal["auto", "on", "off"]

# Tokens that must match before the next ones are taken over; most tokens drafted at once.
MATCH, MOST = 3, 6
# Without drafts nothing is learned about them: every so many passes a few rows try one token.
PROBE_ROWS = 8
# How many drafted tokens an estimate of their worth remembers, and what it says before the first.
MEMORY, FIRST_GUESS, FIRST_WEIGHT = 256.0, 0.3, 8.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Of passes, in rows."""

    whole: int  # what a pass takes besides the arithmetic of its rows: reading the weights, above all
    drafting: int  # what a pass with drafts takes besides, for the host must have seen every token before it
    most: int  # rows of a pass with drafts
    probe_every: int  # passes; no divisor of a page's size, or every try would fall on its end, where there is no room


# Measured on a CPU, a pass is worth 13 rows for a model of 1 M parameters and about 20 for one of 60 M. On an H200 a
# captured pass of a 1.5B model takes as long as 300 rows or more take by themselves.
ON_HOST = Costs(whole=16, drafting=0, most=1 << 20, probe_every=13)
ON_ACCELERATOR = Costs(whole=300, drafting=200, most=512, probe_every=67)


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
    def __init__(self, when: When, scheduler: Scheduler, costs: Costs = ON_HOST) -> None:
        self.when, self.scheduler, self.costs = when, scheduler, costs
        self._texts: dict[int, _Texts] = {}
        self.drafted = self.kept = 0  # tokens, ever
        self.reset()

    def reset(self) -> None:
        """New weights: what was learned of drafts' worth is no longer true. Also makes a step's work depend on nothing
        before it, so that a resumed run repeats it."""
        self._tried, self._good = FIRST_WEIGHT, FIRST_WEIGHT * FIRST_GUESS
        self._passes = 0

    def is_due(self, rows: int) -> bool:
        """Whether to ask `propose` for the next pass, of so many rows. Where not, the pass is counted here."""
        is_due = self._most(rows) > 0 or self._is_probe(rows, self._passes + 1)
        self._passes += not is_due
        return is_due

    def propose(self, rows: Array) -> Drafts | None:
        self._passes += 1
        most, trying = self._most(len(rows)), rows
        if most == 0:
            if not self._is_probe(len(rows), self._passes):
                return None
            most, trying = 1, rows[:PROBE_ROWS]
        count, tokens = np.zeros(len(rows), np.int64), np.zeros((len(rows), MOST), np.int64)
        for i, slot in enumerate(trying.tolist()):
            draft = self._draft(slot, most)
            count[i] = len(draft)
            tokens[i, : len(draft)] = draft
        return Drafts(count, tokens) if count.any() else None

    def _is_probe(self, rows: int, passes: int) -> bool:
        return passes % self.costs.probe_every == 0 and rows + PROBE_ROWS <= self.costs.most

    def _most(self, rows: int) -> int:
        """How many tokens to draft at most, so that the tokens made per time are the most to be expected."""
        room = min(MOST, max(self.costs.most // max(rows, 1) - 1, 0))
        if self.when == "on":
            return room
        chance, drafts = self._good / self._tried, np.arange(room + 1)
        gain = np.cumsum(chance**drafts)  # tokens a row makes with 0 … `room` drafts
        cost = self.costs.whole + rows * (1 + drafts) + self.costs.drafting * (drafts > 0)
        return int(np.argmax(gain / cost))

    def judge(self, drafts: Drafts, rows: Array, ahead: Array, drawn: Drawn) -> tuple[list[Pending], Array]:
        """One token of every row, then the drafts that turned out right, place by place; and every row's last token.

        Beside rows with drafts there may be others after them, which drew one token each."""
        slots, start = self.scheduler.slots, np.flatnonzero(ahead == 0)
        accepted = np.zeros(len(rows), np.int64)
        accepted[: len(drafts.count)] = drafts.accepted(drawn.tokens.numpy())
        self.note(drafts, accepted[: len(drafts.count)])
        slots.launched[rows] += 1
        pending = [Pending(rows, slots.arrival[rows], drawn.at(start))]
        for place in range(1, int(accepted.max()) + 1):
            right = np.flatnonzero(accepted >= place)
            pending.append(
                Pending(rows[right], slots.arrival[rows[right]], drawn.at(start[right] + place), is_draft=True)
            )
        return pending, drawn.tokens.numpy()[start + accepted]

    def _draft(self, slot: int, most: int) -> list[int]:
        slots, sequence = self.scheduler.slots, self.scheduler.sequence[slot]
        if sequence is None or slots.steered[slot] or slots.tops[slot]:
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
        texts = self._texts.setdefault(sequence.request.id, _Texts())
        texts.ended += 1
        if sequence.index in texts.texts:
            known = len(texts.texts[sequence.index]) - len(sequence.request.prompt)
            texts.extend(sequence.index, sequence.tokens[known:])
        if texts.ended >= sequence.request.n:
            del self._texts[sequence.request.id]

    def expect(self, request: Request) -> None:
        """A sample of `request` goes on after a pause; those that are not resumed have ended, or never come."""
        self._texts.setdefault(request.id, _Texts(ended=request.n)).ended -= 1

    def forget(self, request_id: int | None = None) -> None:
        if request_id is None:
            self._texts.clear()
        else:
            self._texts.pop(request_id, None)


def speculator_for(
    when: When, scheduler: Scheduler, has_graphs: bool, has_kernels: bool, has_states: bool = False
) -> Speculator | None:
    """In graphs "auto" stays off: that it pays there has not been measured."""
    if has_states:
        if when == "on":
            raise ConfigError(
                "rollout.speculate=on: the model has layers with a state, which drafts that turn out wrong would spoil",
                "set rollout.speculate=auto",
            )
        return None
    if has_graphs:
        return Speculator(when, scheduler, ON_ACCELERATOR) if when == "on" else None
    if has_kernels:
        return Speculator(when, scheduler) if when != "off" else None
    if when == "on":
        raise ConfigError(
            "rollout.speculate=on: drafts are decoded as captured graphs on an accelerator (one rank of a model "
            "that the lean pass knows, with Triton) or by the compiled kernels on a CPU (float32, cache not fp8), "
            "and neither serves this model here",
            "set rollout.speculate=auto",
        )
    return None
