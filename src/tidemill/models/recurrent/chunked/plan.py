"""Where the tokens of a packed row lie in chunks, and what the sequences that they belong to begin with.

A segment is a run of tokens of one sequence: a whole sample, a prompt, a response behind its prompt, or what is read of
a prompt behind what was read before. Segments that begin with the state after another one are of a later phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidemill.models.upload import upload

CHUNK = 64
NOTHING = -1
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    length: int
    parent: int = NOTHING  # the segment, of those before, after which it comes
    given: int = NOTHING  # or the state that it was given with the call


@dataclass(frozen=True, slots=True)
class Phase:
    """Segments whose states are known at one time. Their chunks lie one after another."""

    segments: list[int]
    first: int  # chunk
    ends: Tensor  # (segments + 1,) int32: where each one's chunks end, counted from `first`; 0 first
    counts: list[int]  # chunks of each
    parents: Tensor | None  # (segments,) their places among the first phase's; None: they begin with nothing or a given
    givens: Tensor | None  # (segments,) the states that were given; None: from nothing


@dataclass(frozen=True, slots=True)
class Taps:
    """For a causal convolution: which row each tap of a token looks at, and the same from the row's side. Rows count
    from the first of what is put before the tokens."""

    source: Tensor  # (tokens, width) int32, NOTHING where there is none; the last tap is the token itself
    target: Tensor  # (rows, width) int32: the token whose tap it is, as far as there is one in the row's own segment
    crossing: tuple[Tensor, Tensor, Tensor]  # rows, tokens and taps of all others


class RowPlan:
    """Of the segments of one row, in their order."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.segments, self.device = list(segments), device
        self.starts = np.cumsum([0, *(s.length for s in self.segments)])
        self._taps: dict[int, Taps] = {}

    @staticmethod
    def packed(lengths: Sequence[int], device: torch.device) -> RowPlan:
        return RowPlan([Segment(n) for n in lengths], device)

    @staticmethod
    def shared(prompts: Sequence[int], responses: Sequence[int], group: Sequence[int], device: torch.device) -> RowPlan:
        behind = [Segment(n, parent=g) for n, g in zip(responses, group)]
        return RowPlan([*(Segment(n) for n in prompts), *behind], device)

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    # -- chunks --------------------------------------------------------------------------------------------------

    @cached_property
    def phases(self) -> list[Phase]:
        found, first = [], 0
        places: dict[int, int] = {}
        for is_later in (False, True):
            own = [i for i, s in enumerate(self.segments) if s.length and (s.parent != NOTHING) == is_later]
            if not own:
                continue
            counts = [-(-self.segments[i].length // CHUNK) for i in own]
            parents = givens = None
            if is_later:
                parents = upload([places[self.segments[i].parent] for i in own], self.device)
            else:
                places = {segment: place for place, segment in enumerate(own)}
                if any(self.segments[i].given != NOTHING for i in own):
                    givens = upload([self.segments[i].given for i in own], self.device)
            ends = upload(np.cumsum([0, *counts]), self.device, np.int32)
            found.append(Phase(own, first, ends, counts, parents, givens))
            first += sum(counts)
        return found

    @cached_property
    def chunks(self) -> int:
        return sum(sum(phase.counts) for phase in self.phases)

    @cached_property
    def gather(self) -> Tensor:
        """(chunks · CHUNK,) the token at each place; one more than the last where there is none."""
        return self._layout[0]

    @cached_property
    def scatter(self) -> Tensor:
        """(tokens,) the place of each token."""
        return self._layout[1]

    @cached_property
    def _layout(self) -> tuple[Tensor, Tensor]:
        gather = np.full(self.chunks * CHUNK, self.tokens, np.int64)
        scatter = np.zeros(self.tokens, np.int64)
        for phase in self.phases:
            at = phase.first * CHUNK
            for segment, count in zip(phase.segments, phase.counts):
                start, length = int(self.starts[segment]), self.segments[segment].length
                gather[at : at + length] = np.arange(start, start + length)
                scatter[start : start + length] = np.arange(at, at + length)
                at += count * CHUNK
        return upload(gather, self.device), upload(scatter, self.device)

    # -- convolutions --------------------------------------------------------------------------------------------

    def taps(self, width: int) -> Taps:
        """`width - 1` rows of each given state are put before the tokens, state after state."""
        if width not in self._taps:
            self._taps[width] = self._make_taps(width)
        return self._taps[width]

    def _make_taps(self, width: int) -> Taps:
        before = width - 1
        rows_before = before * (1 + max((s.given for s in self.segments), default=NOTHING))
        source = np.full((self.tokens, width), NOTHING, np.int64)
        target = np.full((rows_before + self.tokens, width), NOTHING, np.int64)
        crossing: list[tuple[int, int, int]] = []
        for segment, start in zip(self.segments, self.starts):
            own = rows_before + start + np.arange(segment.length)
            past = self._past(segment, rows_before, before)
            whole = np.concatenate([past, own])
            for tap in range(width):
                source[start : start + segment.length, tap] = whole[tap : tap + segment.length]
                back = before - tap  # rows behind the token
                kept = max(segment.length - back, 0)
                target[own[:kept], tap] = start + back + np.arange(kept)
                for token in range(min(back, segment.length)):
                    if (row := int(source[start + token, tap])) != NOTHING:
                        crossing.append((row, int(start) + token, tap))
        made = np.array(crossing, np.int64).reshape(-1, 3)
        rows, tokens, which = (upload(made[:, i], self.device) for i in range(3))
        return Taps(upload(source, self.device, np.int32), upload(target, self.device, np.int32), (rows, tokens, which))

    def _past(self, segment: Segment, rows_before: int, before: int) -> Ints:
        """The rows of the `before` tokens before a segment; NOTHING where there are none."""
        if segment.given != NOTHING:
            return segment.given * before + np.arange(before)
        if segment.parent == NOTHING:
            return np.full(before, NOTHING, np.int64)
        start, length = int(self.starts[segment.parent]), self.segments[segment.parent].length
        at = start + length - before + np.arange(before)
        return np.where(at >= start, rows_before + at, NOTHING)
