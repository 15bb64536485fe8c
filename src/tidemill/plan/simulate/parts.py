"""What stands in for models: an engine, a learner, rewards and a feed that take time and make nothing.

The workers of stages around them are the real ones. What they commit are columns of one number a row: the ledger sees
ids, groups, lengths and versions, which is all that it decides by.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np

from tidemill.batch import GROUP, ID, LENGTH, VERSION, Batch, Column
from tidemill.dock import Counts, Dock, Want
from tidemill.dock.ledger import sampler
from tidemill.flow.stages.stage import committed
from tidemill.flow.tally import Tally
from tidemill.graph import Graph
from tidemill.plan.decoding import DecodingClock, Sample, Trunk
from tidemill.plan.lengths import Lengths
from tidemill.plan.time_model import TimeModel
from tidemill.recipe.config import Config
from tidemill.rollout.engine import Completion, Partial, Request

CHUNK = 512  # groups whose lengths are drawn at once


class Works(Protocol):
    """Who takes time: a host."""

    def work(self, seconds: float, is_interruptible: bool = False) -> float: ...


class Book(Protocol):
    """How long the samples of every group are, whoever makes them and however often."""

    def responses(self, group: int) -> Any: ...

    def prompt(self, group: int) -> int: ...


class LengthBook:
    """The lengths of every group, whoever makes it and however often."""

    def __init__(self, lengths: Lengths, each: int, seed: int) -> None:
        self.lengths, self.each, self.seed = lengths, each, seed
        self._responses: dict[int, Any] = {}
        self._prompts: dict[int, Any] = {}

    def responses(self, group: int) -> Any:
        chunk, at = divmod(group, CHUNK)
        if chunk not in self._responses:
            self._forget(chunk)
            self._responses[chunk] = self.lengths.draw(CHUNK * self.each, self.seed + 7919 * chunk).reshape(CHUNK, -1)
        return self._responses[chunk][at]

    def prompt(self, group: int) -> int:
        chunk, at = divmod(group, CHUNK)
        if chunk not in self._prompts:
            self._prompts[chunk] = self.lengths.draw_prompts(CHUNK, self.seed + 7919 * chunk)
        return int(self._prompts[chunk][at])

    def _forget(self, chunk: int) -> None:
        for book in (self._responses, self._prompts):
            for old in [c for c in book if c < chunk - 64]:
                del book[old]


class SimulatedEngine:
    """Implements `RolloutEngine` for whole samples."""

    def __init__(self, host: Works, clock: DecodingClock, book: Book, config: Config, groups_only: bool) -> None:
        self.host, self.clock, self.book = host, clock, book
        self.version = 0
        self.recomputes = config.flow.unfinished_samples == "recompute_kv"
        self.groups_only = groups_only
        self._requests: dict[int, Request] = {}

    @property
    def has_work(self) -> bool:
        return self.clock.has_work

    def submit(self, request: Request) -> None:
        group, rows = request.user
        lengths, prompt = self.book.responses(group), self.book.prompt(group)
        made = [Sample(prompt, int(lengths[row]), (request, i, self.version)) for i, row in enumerate(rows)]
        self.clock.add(Trunk(prompt, deque(made)))

    def step(self) -> list[Completion]:
        span = self.clock.leap() if self.groups_only else self.clock.span()
        left = self.host.work(span.seconds, is_interruptible=True)
        steps = span.steps
        if left > 1e-9:  # to the end of the step under way
            worked = span.seconds - left
            done = self.clock.leap(worked) if self.groups_only else None
            steps = min(span.steps, (self.clock.steps_within(worked, span.steps) if done is None else done.steps) + 1)
            self.host.work(left / max(1, span.steps - steps + 1) if steps < span.steps else left)
        return [self._completion(sample) for sample in self.clock.advance(steps)]

    def _completion(self, sample: Sample) -> Completion:
        request, index, version = sample.user
        versions = [version] if version == self.version else [version, self.version]
        return Completion(request, index, range(sample.length), [], versions, "stop")  # type: ignore[arg-type]

    def pause(self) -> list[Partial]:
        return []

    def resume(self, partials: Sequence[Partial]) -> None:
        """Nothing was paused."""

    def cancel(self, request_id: int) -> None:
        clock = self.clock
        kept = [t for t in clock.waiting if not (t.samples and t.samples[0].user[0].id == request_id)]
        clock.waiting = deque(kept)
        clock.leave(lambda sample: sample.user[0].id == request_id)

    def load(self, weights: Any, version: int) -> None:
        if version != self.version and self.clock.running and self.recomputes:
            self.clock.read_again()
        self.version = version

    def sleep(self) -> None:
        """Its memory is not simulated."""

    def wake(self) -> None: ...


def made_columns(graph: Graph) -> Callable[[list[Completion]], tuple[Batch, Counts | None]]:
    """In place of tokens one number a row."""
    writes = [name for name in graph.stage("rollout").writes if name not in (VERSION, LENGTH)]

    def made_of(made: list[Completion]) -> tuple[Batch, Counts | None]:
        count = len(made)
        prompts = np.array([c.request.prompt[0] for c in made], np.int32)
        oldest = np.array([c.versions[0] for c in made], np.int32)
        columns: dict[str, Any] = {
            **_blank(writes, count),
            "prompt_length": prompts,
            "versions": oldest,
            VERSION: oldest,
            LENGTH: prompts + np.array([len(c.tokens) for c in made], np.int32),
        }
        return Batch(columns), None

    return made_of


@cache
def _zeros(count: int) -> Column:
    blank = np.zeros(count, np.uint8)
    blank.flags.writeable = False  # the dock need not copy it
    return Column(blank)


def _blank(names: Sequence[str], count: int) -> dict[str, Column]:
    return dict.fromkeys(names, _zeros(count))


class SimulatedLearner:
    """Implements `Learns`. All ranks at once: what the slowest team takes is what all of them take."""

    def __init__(self, host: Works, model: TimeModel, slowest: Callable[[], float]) -> None:
        self.host, self.model, self.slowest = host, model, slowest
        self.version = 0

    def accumulate(self, batch: Batch) -> None:
        self.host.work(self._team_s(batch, True) * self.slowest())

    def update(self) -> dict[str, float]:
        self.host.work(self.model.update_s * self.slowest())
        self.version += 1
        return {}

    def logprobs(self, batch: Batch) -> Column:
        self.host.work(self._team_s(batch, False) * self.slowest())
        return _zeros(batch.rows)

    def held(self) -> list[Any]:
        return []

    def _team_s(self, batch: Batch, trains: bool) -> float:
        """Of the team with most tokens."""
        keys, place, sizes = np.unique(batch.values(GROUP), return_inverse=True, return_counts=True)
        length, prompt = batch.values(LENGTH).astype(np.int64), batch.values("prompt_length").astype(np.int64)
        made = np.bincount(place, length - prompt, len(keys))
        prompts = np.bincount(place, prompt, len(keys)) / sizes
        chosen = np.arange(len(keys))
        teams = self.model.teams
        if teams > 1:
            parts = sampler.balance((made + prompts * sizes).astype(np.int64), teams)
            loads = [float(made[list(part)].sum()) for part in parts]
            chosen = np.array(parts[int(np.argmax(loads))], np.int64)
        if not len(chosen):
            return 0.0
        inside = np.isin(place, chosen)
        own = (length - prompt)[inside]
        measured = self.model.batch_s(float(length[inside].sum()), len(own), trains)
        if measured is not None:
            return measured
        squares = np.bincount(place[inside], own.astype(float) ** 2, len(keys))[chosen]
        # A response of this length, as often as there are, sees as many tokens as the group's own do.
        even = [[float(np.sqrt(s / n))] * int(n) for s, n in zip(squares, sizes[chosen])]
        work = self.model.passes(prompts[chosen].tolist(), even, trains)
        total = float(made[chosen].sum())
        guessed = sum(map(sum, even))
        return self.model.team_s(work) * (total / guessed if guessed else 1.0)


class SimulatedReward:
    """Scores after a while; the value is drawn from the sample's own number."""

    name, waits = "reward", False

    def __init__(self, dock: Dock, host: Works, seconds: float, tally: Tally, writes: Sequence[str]) -> None:
        self.dock, self.host, self.seconds, self.tally, self.writes = dock, host, seconds, tally, writes

    def begin(self, first_group: int, tag: str | None) -> None:
        """Scores samples of whatever step."""

    def poll(self) -> bool:
        lease = self.dock.take(self.name, Want(rows=1024))
        if lease is None:
            return False
        rows = lease.batch.rows
        with self.tally.time(self.name):
            self.host.work(rows * self.seconds)
        value = (lease.batch.values(ID) * 2654435761 % 1000 < 500).astype(np.float32)
        committed(lease, Batch({**_blank(self.writes, rows), "reward": value}))
        return True


class SimulatedFeed:
    """Prompts of drawn lengths, without end."""

    bad_rows: tuple[str, ...] = ()

    def __init__(self, config: Config, graph: Graph, book: Book, host: Works, row_s: float) -> None:
        self.config, self.graph, self.book, self.host, self.row_s = config, graph, book, host, row_s
        self.groups = 0
        self.places: list[int] = []

    def rows(self, prompts: int | None = None) -> Batch:
        first, self.groups = self.groups, self.groups + (prompts or self.config.train.prompts_per_step)
        self.places = list(range(first, self.groups))
        return self.rows_again(self.places, self.places)

    def rows_again(self, numbers: Sequence[int], places: Sequence[int]) -> Batch:
        prompts, n = len(numbers), self.config.train.samples_per_prompt
        groups = np.repeat(np.array(numbers, np.int64), n)
        own = np.array([self.book.prompt(g) for g in numbers], np.int32)
        place = np.repeat(np.arange(prompts), n)
        self.host.work(len(groups) * self.row_s)
        prompt = Column(own, np.arange(prompts + 1, dtype=np.int64)).grouped(place)
        given: dict[str, Any] = _blank([name for name in self.graph.source if name != "prompt"], len(groups))
        meta: dict[str, Any] = {
            ID: groups * n + np.tile(np.arange(n), prompts),
            GROUP: groups,
            "group_size": np.full(len(groups), n, np.int32),
            LENGTH: own[place],
        }
        return Batch({**given, **meta, "prompt": prompt})

    def state(self) -> dict[str, Any]:
        return {"position": self.groups, "groups": self.groups}

    def restore(self, state: dict[str, Any]) -> None:
        self.groups = int(state["groups"])


class SimulatedAlgorithm:
    """What of an algorithm decides about flow: which groups are kept, and whether a step is judged as a whole."""

    def __init__(self, algorithm: Any, writes: Sequence[str]) -> None:
        self._algorithm, self._writes = algorithm, writes

    def wants_whole_step(self, config: Config) -> bool:
        return bool(self._algorithm.wants_whole_step(config))

    def advantages(self, batch: Batch, config: Config) -> Batch:
        return Batch(_blank(self._writes, batch.rows))

    def keep(self, batch: Batch, config: Config) -> Any:
        kept = np.ones(batch.rows, np.bool_)
        if not config.algorithm.dynamic_sampling:
            return kept
        values, groups = batch.values("reward"), batch.values(GROUP)
        for group in np.unique(groups):
            inside = groups == group
            kept[inside] = values[inside].max() != values[inside].min()
        return kept
