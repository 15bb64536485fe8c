"""The worker that rolls out: prompts in, samples with their log-probabilities and versions out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tidemill import tiles
from tidemill.batch import GROUP, LENGTH, VERSION, Batch, Column
from tidemill.dock import Counts, Dock, Lease, Want
from tidemill.environment.api import Played, Task
from tidemill.errors import TidemillError
from tidemill.flow.adjust import adjusted
from tidemill.flow.stages.stage import at_any_time, committed
from tidemill.flow.tally import Tally
from tidemill.recipe.config import Config
from tidemill.rollout.engine import Completion, Request, RolloutEngine, Sampling, cache_counts

GREEDY_ID = 1 << 46  # request ids of greedy rows: distinct from every group's
FINISH = ("stop", "length", "error", "cancelled")  # the column `finish` holds an index into it


def sampling_of(config: Config, eos_seed: int) -> Sampling:
    rollout = config.rollout
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        max_tokens=rollout.max_new_tokens,
        stop_strings=rollout.stop,
        seed=eos_seed,
    )


@dataclass(slots=True)
class _Rolling:
    lease: Lease
    rows: int
    done: dict[int, Completion]


class RolloutWorker:
    """Rolls out with one lease per group, so that a finished group moves on while longer ones are still being made."""

    name = "rollout"

    def __init__(
        self,
        dock: Dock,
        engine: RolloutEngine,
        config: Config,
        tally: Tally,
        own: Any = None,
    ) -> None:
        """`own`: has `requests`, which makes those of a group's rows, and `outputs`, which makes what is committed for
        a finished group, and its counts. None: rows are prompts."""
        self.dock, self.engine, self.config, self.tally = dock, engine, config, tally
        self.requests = self._requests if own is None else own.requests
        self.outputs = rollout_outputs if own is None else own.outputs
        self.sampling = sampling_of(config, config.seed)
        self.rolling: dict[int, _Rolling] = {}
        self.peers = 1  # rollout workers that share the work, this one included
        self.my_turn = at_any_time  # called before the engine works
        self.finished = 0  # groups
        self._counted = cache_counts(engine)

    def adjust(self, changes: Mapping[str, float]) -> None:
        self.config = adjusted(self.config, changes)
        self.sampling = replace(self.sampling, temperature=self.config.rollout.temperature)

    def begin(self, first_group: int, tag: str | None) -> None:
        """Do nothing: it makes samples of any step."""

    @property
    def waits(self) -> bool:
        return False

    def poll(self) -> bool:
        self._let_go()
        moved = self._fill()
        if not self.engine.has_work:
            return moved
        self.my_turn()
        with self.tally.time(self.name, rows=min(self._making(), self.config.rollout.concurrent), steps=1):
            finished = self.engine.step()
        self.tally.add("machine/engine_steps", 1.0)
        self._count_cache()
        self.take_in(finished)
        return True

    def _count_cache(self) -> None:
        before, self._counted = self._counted, cache_counts(self.engine)
        for name, value in self._counted.items():
            if value > before.get(name, 0):
                self.tally.add(name, float(value - before.get(name, 0)))

    def take_in(self, finished: Sequence[Completion]) -> None:
        for completion in finished:
            self._finish(completion)

    def _fill(self) -> bool:
        """Take groups while there is room. A worker without work also takes what another is late with."""
        moved, room = False, self._room()
        while self._making() < room:
            is_idle = not (moved or self.engine.has_work)
            want = Want(groups=1, late=is_idle and self.peers > 1)
            lease = self.dock.take(self.name, want)
            if lease is None:
                return moved
            self.my_turn()
            group = int(lease.batch.values(GROUP)[0])
            self.rolling[group] = _Rolling(lease, lease.batch.rows, {})
            for request in self.requests(group, lease.batch):
                self.engine.submit(request)
            moved = True
        return moved

    def _making(self) -> int:
        """Count samples that were taken and are not finished yet."""
        return sum(r.rows - len(r.done) for r in self.rolling.values())

    def _room(self) -> int:
        """Return how many samples to take: as many as the engine runs at once, and as many again to queue; but no
        more than an equal share of what is left, so that no worker is idle while another has a queue."""
        most = 2 * self.config.rollout.concurrent
        if self.peers == 1 or self._making() >= most:
            return most
        return min(most, -(-self.dock.progress(self.name).pending // self.peers))

    def _let_go(self) -> None:
        """Cancel groups that were given to another worker because this one was too late."""
        for group in [g for g, rolling in self.rolling.items() if rolling.lease.is_lost]:
            del self.rolling[group]
            for id in (group, GREEDY_ID + group):
                self.engine.cancel(id)

    def _requests(self, group: int, batch: Batch) -> list[Request]:
        """Make the requests of the group's rows; those marked greedy, which the others are compared with, are one of
        their own."""
        prompt = batch["prompt"][0].tolist()
        greedy = batch.values("greedy") != 0 if "greedy" in batch else np.zeros(batch.rows, np.bool_)
        drawn, fixed = np.flatnonzero(~greedy).tolist(), np.flatnonzero(greedy).tolist()
        task = None if self.config.environment is None else task_of(batch.row(0))
        shown = tiles.kept(tiles.of_batch(batch.gather([0]))[0])
        requests = []
        if drawn:
            own = (group, drawn)
            requests.append(Request(group, prompt, self.sampling, n=len(drawn), task=task, tiles=shown, user=own))
        if fixed:
            sampling = replace(self.sampling, temperature=0.0)
            id = GREEDY_ID + group
            requests.append(Request(id, prompt, sampling, n=len(fixed), task=task, tiles=shown, user=(group, fixed)))
        return requests

    def _finish(self, completion: Completion) -> None:
        group, rows = completion.request.user
        rolling = self.rolling.get(group)
        if rolling is None or completion.finish == "cancelled":
            return  # let go
        rolling.done[rows[completion.index]] = completion
        if len(rolling.done) < rolling.rows:
            return
        del self.rolling[group]
        made = [rolling.done[i] for i in range(rolling.rows)]
        failed = next((c for c in made if c.finish == "error"), None)
        if failed is not None:
            raise TidemillError(
                f"rollout of group {failed.request.id} failed: {failed.error}",
                "non-finite weights mean the run diverged: lower learn.lr, or resume from an earlier checkpoint",
            )
        columns, counts = self.outputs(made)
        self.finished += committed(rolling.lease, columns, counts=counts)


def task_of(row: dict[str, Any]) -> Task:
    return Task(row["answer"], json.loads(row["meta"]), row["where"])


def rollout_outputs(made: list[Completion]) -> tuple[Batch, Counts]:
    return rollout_columns(made), rollout_counts(made)


def rollout_columns(made: list[Completion]) -> Batch:
    columns: dict[str, Any] = {
        "tokens": Column.jagged([[*c.request.prompt, *c.tokens] for c in made], np.int32),
        "prompt_length": np.array([len(c.request.prompt) for c in made], np.int32),
        "logprobs": Column.jagged([c.logprobs for c in made], np.float32),
        "versions": Column.jagged([c.versions for c in made], np.int32),
        "mask": Column.jagged([np.ones(len(c.tokens)) if c.mask is None else c.mask for c in made], np.uint8),
        "finish": np.array([FINISH.index(c.finish) for c in made], np.int8),
        VERSION: np.array([min(c.versions) for c in made], np.int32),
        LENGTH: np.array([len(c.request.prompt) + len(c.tokens) for c in made], np.int32),
    }
    if made and made[0].routes is not None:
        columns["routes"] = Column.jagged([c.routes for c in made], np.int16)  # type: ignore[misc]
    if made and made[0].starts is not None:
        columns["starts"] = Column.jagged([c.starts or () for c in made], np.int32)
    if made and made[0].played is not None:
        columns["played"] = Column.text([json.dumps((c.played or Played()).plain()) for c in made])
        columns["seat"] = np.array([c.seat for c in made], np.int8)
        turns = [c.turn_rewards or [] for c in made]
        columns["turns"] = Column.jagged([[place for place, _ in own] for own in turns], np.int32)
        if made[0].request.tiles or any(c.tiles for c in made):
            columns |= tiles.columns([c.tiles for c in made], tiles.TURN_COLUMNS)
        columns["turn_rewards"] = Column.jagged([[reward for _, reward in own] for own in turns], np.float32)
    return Batch(columns)


def rollout_counts(made: list[Completion]) -> Counts:
    sums, means = [], []
    for c in made:
        own = len(c.tokens) if c.mask is None else int(sum(c.mask))
        added = {"prompt_tokens": float(len(c.request.prompt)), "made_tokens": float(own)}
        averaged = {"response_tokens": float(len(c.tokens)), "truncated_share": float(c.finish == "length")}
        if c.kept is not None:  # top-p, top-k or min-p left tokens out
            averaged["kept_mass"] = float(np.exp(c.kept).mean())
        if c.played is not None:
            averaged |= {"turns": float(c.played.turns)}
            averaged |= {f"environment/{name}": value for name, value in c.played.parts.items()}
            if c.played.error is not None:
                added["environment_errors"] = 1.0
        sums.append(added)
        means.append(averaged)
    return Counts.of_rows(sums, means)
