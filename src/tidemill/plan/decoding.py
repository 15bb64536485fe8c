"""A rollout engine as a clock: continuous batching whose steps take what the model of time says, from one sample's end
to the next in one leap.

Nothing here waits. `span` says how long the engine works until something changes, `advance` moves it by so many steps.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class EngineTime(Protocol):
    """What the clock asks of the model of time."""

    @property
    def token_read_s(self) -> float: ...

    def step_s(self, rows: int) -> float: ...

    def prefill_s(self, tokens: float, pairs: float, ends: float) -> float: ...


@dataclass(slots=True, eq=False)
class Sample:
    """One row of a group: `made` of `length` tokens so far."""

    prompt: int
    length: int
    user: Any = None
    made: int = 0
    began: int = 0  # the step of the engine at which it took its slot
    trunk: Trunk | None = None


@dataclass(slots=True, eq=False)
class Trunk:
    """Samples that share a prompt: it is read once for all of them."""

    prompt: int
    samples: deque[Sample]


@dataclass(frozen=True, slots=True)
class Span:
    seconds: float
    steps: int


@dataclass(slots=True, eq=False)
class DecodingClock:
    time: EngineTime
    slots: int
    capacity: float = float("inf")  # tokens in the cache
    speed: float = 1.0  # above 1: a device that is slower than its kind
    waiting: deque[Trunk] = field(default_factory=deque)
    running: list[tuple[int, int, Sample]] = field(default_factory=list)  # by the step at which each ends
    step: int = 0
    held: float = 0.0  # tokens in the cache
    due_s: float = 0.0  # of prompts that are being read
    made_tokens: int = 0
    _number: int = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def rows(self) -> int:
        return len(self.running)

    def add(self, trunk: Trunk) -> None:
        self.waiting.append(trunk)

    def clear(self) -> None:
        """Nobody wants any of it any more."""
        self.waiting.clear()
        self.running, self.held, self.due_s = [], 0.0, 0.0

    def admit(self) -> None:
        """Samples that have room take their slots; their prompts' reading is due."""
        tokens = pairs = 0.0
        ends = 0
        while self.waiting and len(self.running) < self.slots:
            trunk = self.waiting[0]
            sample = trunk.samples[0]
            if self.running and self.held + trunk.prompt + sample.length - sample.made > self.capacity:
                break
            context = trunk.prompt + sample.made
            if trunk.prompt >= 0:
                tokens += context
                pairs += context * context / 2
            seated = 0
            while trunk.samples and len(self.running) < self.slots:
                sample = trunk.samples.popleft()
                if seated and sample.made:  # read by itself what it had made before
                    tokens += sample.made
                    pairs += sample.made * (trunk.prompt + sample.made / 2)
                sample.trunk = trunk
                self._seat(sample)
                seated += 1
            ends += seated
            if not trunk.samples:
                self.waiting.popleft()
        if tokens:
            self.due_s += self.time.prefill_s(tokens, pairs, ends) * self.speed

    def _seat(self, sample: Sample) -> None:
        self._number += 1
        sample.began = self.step
        left = max(1, sample.length - sample.made)
        heapq.heappush(self.running, (self.step + left, self._number, sample))
        self.held += sample.prompt + sample.made

    def span(self) -> Span:
        """Until the next sample ends; nothing without work."""
        self.admit()
        if not self.running:
            return Span(0.0, 0)
        steps = max(1, self.running[0][0] - self.step)
        return Span(self.due_s + self._steps_s(steps), steps)

    def _steps_s(self, steps: int) -> float:
        rows = len(self.running)
        read = steps * self.held + rows * steps * (steps + 1) / 2
        return (steps * self.time.step_s(rows) + read * self.time.token_read_s) * self.speed

    def steps_within(self, seconds: float, most: int) -> int:
        """How many whole steps fit, at most `most`: for an engine that is interrupted."""
        left = seconds - self.due_s
        if left <= 0:
            return 0
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self._steps_s(middle) <= left:
                low = middle
            else:
                high = middle - 1
        return low

    def leap(self, most_s: float = float("inf")) -> Span:
        """Until the first group is whole, where nobody waits for a slot: several samples end on the way. With `most_s`
        as far as that goes, in whole steps."""
        self.admit()
        if self.waiting or not self.running:
            span = self.span()
            return span if span.seconds <= most_s else Span(most_s, self.steps_within(most_s, span.steps))
        left: dict[int, int] = {}
        for _, _, sample in self.running:
            left[id(sample.trunk)] = left.get(id(sample.trunk), 0) + 1
        rows, held, at, spent = len(self.running), self.held, self.step, self.due_s
        step_s, token_read_s, speed = self.time.step_s, self.time.token_read_s, self.speed
        for end, _, sample in sorted(self.running):
            steps = max(0, end - at)
            read = steps * held + rows * steps * (steps + 1) / 2
            seconds = (steps * step_s(rows) + read * token_read_s) * speed
            if spent + seconds > most_s:
                inside = int(steps * max(0.0, most_s - spent) / max(seconds, 1e-12))
                return Span(most_s, at + inside - self.step)
            spent, at, held = spent + seconds, at + steps, held + rows * steps
            rows, held = rows - 1, held - (sample.prompt + sample.made + at - sample.began)
            left[id(sample.trunk)] -= 1
            if not left[id(sample.trunk)]:
                break
        return Span(spent, at - self.step)

    def advance(self, steps: int) -> list[Sample]:
        """So many tokens of every running sample; those that ended."""
        if not steps:
            return []
        self.due_s = 0.0
        rows = len(self.running)
        self.step += steps
        self.held += rows * steps
        self.made_tokens += rows * steps
        done = []
        while self.running and self.running[0][0] <= self.step:
            end, _, sample = heapq.heappop(self.running)
            self.made_tokens -= self.step - end
            self.held -= sample.prompt + sample.made + (self.step - sample.began)
            sample.made = sample.length
            done.append(sample)
        return done

    def leave(self, is_gone: Callable[[Sample], bool]) -> None:
        """Running samples that nobody wants any more."""
        kept = []
        for entry in self.running:
            sample = entry[2]
            if is_gone(sample):
                self.held -= sample.prompt + sample.made + (self.step - sample.began)
            else:
                kept.append(entry)
        heapq.heapify(kept)
        self.running = kept

    def read_again(self) -> None:
        """New weights: unfinished samples are read again before they go on."""
        tokens = pairs = 0.0
        for _, _, sample in self.running:
            context = sample.prompt + sample.made + (self.step - sample.began)
            tokens += context
            pairs += context * context / 2
        if tokens:
            self.due_s += self.time.prefill_s(tokens, pairs, len(self.running)) * self.speed


@dataclass(frozen=True, slots=True)
class Drained:
    seconds: float
    tokens: float
    ends: tuple[float, ...]  # of each sample, in the order in which they end
    rows: float  # at once, on average


def drain(
    time: EngineTime, groups: Sequence[tuple[int, Sequence[int]]], slots: int, capacity: float = float("inf")
) -> Drained:
    """All samples of these groups, given as (prompt, responses), from the first token to the last."""
    clock = DecodingClock(time, slots, capacity)
    for prompt, responses in groups:
        clock.add(Trunk(prompt, deque(Sample(prompt, int(n)) for n in responses)))
    spent, weighed, ends = 0.0, 0.0, []
    while clock.has_work:
        span = clock.span()
        rows = clock.rows
        spent += span.seconds
        weighed += rows * span.seconds
        ends += [spent] * len(clock.advance(span.steps))
    return Drained(spent, float(clock.made_tokens), tuple(ends), weighed / spent if spent else 0.0)
