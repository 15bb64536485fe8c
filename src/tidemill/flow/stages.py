"""Workers: each takes what its stage may read from the dock, works on it, and commits what the stage writes.

A worker is polled. `poll` does a bounded piece of work and says whether anything moved; schedules decide whom to poll.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from tidemill.algorithms.api import Algorithm
from tidemill.batch import GROUP, ID, LENGTH, VERSION, Batch, Column
from tidemill.config import Config
from tidemill.dock import Dock, Lease, LeaseExpired, Want
from tidemill.environment.api import Played, Task, last_said
from tidemill.errors import RewardError, TidemillError
from tidemill.flow.tally import Tally
from tidemill.flow.weights import OwnCopy
from tidemill.learn.api import LearnEngine, Scores, Values
from tidemill.learn.critic import critic_passes
from tidemill.learn.engine import score
from tidemill.reward.api import Sample, Scored
from tidemill.reward.score import Scorer
from tidemill.reward.text import repetition
from tidemill.rollout.engine import Completion, Request, RolloutEngine, Sampling

GREEDY_ID = 1 << 46  # request ids of greedy rows: apart from every group's own
FINISH = ("stop", "length", "error", "cancelled")  # the column `finish` holds the index


class Worker(Protocol):
    name: str  # its stage
    runs_beside: bool  # in threads or processes of its own, so that it takes no time from others

    def begin(self, first_group: int, tag: str | None) -> None:
        """A new step, whose groups count from `first_group`. `tag` marks its rows; None: no other step's are here."""

    def poll(self) -> bool:
        """Do a bounded piece of work; whether anything moved."""

    @property
    def waits(self) -> bool:
        """Whether work is under way elsewhere (another thread or process) that this worker will commit."""


def committed(lease: Lease, outputs: Batch | None = None, drop: Sequence[int] = ()) -> bool:
    """Whether the commit counted: False when the rows were given to another meanwhile, who does the work again."""
    try:
        lease.commit(outputs, drop)
    except LeaseExpired:
        return False
    return True


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
    done: dict[int, Completion]


class RolloutWorker:
    """One lease per group, so that a finished group moves on while longer ones are still being made."""

    name = "rollout"
    runs_beside = False

    def __init__(
        self, dock: Dock, engine: RolloutEngine, config: Config, tally: Tally, weights: OwnCopy | None = None
    ) -> None:
        self.dock, self.engine, self.config, self.tally = dock, engine, config, tally
        self.sampling = sampling_of(config, config.seed)
        self.rolling: dict[int, _Rolling] = {}
        self.weights = weights  # a copy of its own, which may change between two tokens
        self.patience_s = 0.0  # how long an idle worker waits in the dock
        self.peers = 1  # rollout workers that share the work, this one included
        self.finished = 0  # groups
        self._renewed = time.monotonic()

    def begin(self, first_group: int, tag: str | None) -> None:
        """Makes samples of whatever step's rows are there."""

    @property
    def waits(self) -> bool:
        return False

    def poll(self) -> bool:
        self._let_go()
        moved = self._fill()
        if not self.engine.has_work:
            return moved
        self._take_up_weights()
        self._renew_leases()
        with self.tally.time(self.name):
            finished = self.engine.step()
        for completion in finished:
            self._finish(completion)
        return True

    def _fill(self) -> bool:
        """Take groups while there is room. Who has nothing to do also takes what another is late with."""
        moved, room = False, self._room()
        while self._making() < room:
            is_idle = not (moved or self.engine.has_work)
            want = Want(groups=1, late=is_idle and self.peers > 1)
            lease = self.dock.take(self.name, want, wait=self.patience_s if is_idle else 0.0)
            if lease is None:
                return moved
            self._take_up_weights()  # published before these rows were put: they must not begin with older ones
            group = int(lease.batch.values(GROUP)[0])
            self.rolling[group] = _Rolling(lease, {})
            for request in self._requests(group, lease.batch):
                self.engine.submit(request)
            moved = True
        return moved

    def _making(self) -> int:
        """Samples that were taken and are not made yet."""
        return sum(r.lease.batch.rows - len(r.done) for r in self.rolling.values())

    def _room(self) -> int:
        """As many as the engine runs at once, and as many again to queue; but of what is left to make no more than an
        equal share, so that nobody is without work while another has a queue."""
        most = 2 * self.config.rollout.concurrent
        if self.peers == 1 or self._making() >= most:
            return most
        counts = self.dock.state().stages[self.name]
        return min(most, -(-(counts.ready + counts.leased) // self.peers))

    def _let_go(self) -> None:
        """What is someone else's now, because it came too late here, is not made any further."""
        for group in [g for g, rolling in self.rolling.items() if getattr(rolling.lease, "is_lost", False)]:
            del self.rolling[group]
            for id in (group, GREEDY_ID + group):
                self.engine.cancel(id)

    def _take_up_weights(self) -> None:
        if self.weights is not None:
            resumed = self.weights.take_up()
            if resumed:
                self.tally.add("resumed_samples", float(resumed))

    def _renew_leases(self) -> None:
        """A long sample may take longer than a lease lasts."""
        if time.monotonic() - self._renewed > self.config.flow.lease_s / 4:
            self._renewed = time.monotonic()
            for rolling in self.rolling.values():
                rolling.lease.renew()

    def _requests(self, group: int, batch: Batch) -> list[Request]:
        """The group's rows; those marked greedy, which others are compared with, apart from the drawn ones."""
        prompt = batch["prompt"][0].tolist()
        greedy = batch.values("greedy") != 0 if "greedy" in batch else np.zeros(batch.rows, np.bool_)
        drawn, fixed = np.flatnonzero(~greedy).tolist(), np.flatnonzero(greedy).tolist()
        task = None if self.config.environment is None else task_of(batch.row(0))
        requests = []
        if drawn:
            requests.append(Request(group, prompt, self.sampling, n=len(drawn), task=task, user=(group, drawn)))
        if fixed:
            sampling = replace(self.sampling, temperature=0.0)
            id = GREEDY_ID + group
            requests.append(Request(id, prompt, sampling, n=len(fixed), task=task, user=(group, fixed)))
        return requests

    def _finish(self, completion: Completion) -> None:
        group, rows = completion.request.user
        rolling = self.rolling.get(group)
        if rolling is None or completion.finish == "cancelled":
            return  # let go
        rolling.done[rows[completion.index]] = completion
        if len(rolling.done) < rolling.lease.batch.rows:
            return
        del self.rolling[group]
        made = [rolling.done[i] for i in range(rolling.lease.batch.rows)]
        failed = next((c for c in made if c.finish == "error"), None)
        if failed is not None:
            raise TidemillError(
                f"rollout of group {failed.request.id} failed: {failed.error}",
                "non-finite weights mean the run diverged: lower learn.lr, or resume from an earlier checkpoint",
            )
        if not committed(rolling.lease, rollout_columns(made)):
            return
        self.finished += 1
        for c in made:
            self.tally.mean("response_tokens", len(c.tokens))
            self.tally.mean("truncated_share", float(c.finish == "length"))
            if c.kept is not None:  # top-p, top-k or min-p left tokens out
                self.tally.mean("kept_mass", float(np.exp(c.kept).mean()))
            self.tally.add("prompt_tokens", len(c.request.prompt))
            self.tally.add("made_tokens", len(c.tokens) if c.mask is None else sum(c.mask))
            if c.played is not None:
                self._count_play(c.played)

    def _count_play(self, played: Played) -> None:
        self.tally.mean("turns", played.turns)
        for name, value in played.parts.items():
            self.tally.mean(f"environment/{name}", value)
        if played.error is not None:
            self.tally.add("environment_errors", 1)


def task_of(row: dict[str, Any]) -> Task:
    return Task(row["answer"], json.loads(row["meta"]), row["where"])


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
    if made and made[0].played is not None:
        columns["played"] = Column.text([json.dumps((c.played or Played()).plain()) for c in made])
    return Batch(columns)


class RewardWorker:
    """Scores samples in the scorer's own threads or processes while others go on."""

    name = "reward"
    runs_beside = True

    def __init__(
        self,
        dock: Dock,
        scorer: Scorer,
        decode: Callable[[list[int]], str],
        tally: Tally,
        keep_samples: Callable[[dict[str, Any]], None],
    ) -> None:
        self.dock, self.scorer, self.decode, self.tally, self.keep_samples = dock, scorer, decode, tally, keep_samples
        self.scoring: list[tuple[Lease, list[Sample], Future[list[Scored]]]] = []
        self._since = 0.0  # when scoring began

    def begin(self, first_group: int, tag: str | None) -> None:
        """Scores samples of whatever step."""

    @property
    def waits(self) -> bool:
        return bool(self.scoring)

    def poll(self) -> bool:
        lease = self.dock.take(self.name, Want(rows=1024))
        if lease is not None:
            self._since = self._since if self.scoring else time.perf_counter()
            samples = [self._sample(lease.batch.row(i)) for i in range(lease.batch.rows)]
            self.scoring.append((lease, samples, self.scorer.submit(samples)))
        is_done = [future.done() for *_, future in self.scoring]  # asked once: it may become true between two looks
        done = [s for s, done in zip(self.scoring, is_done) if done]
        self.scoring = [s for s, done in zip(self.scoring, is_done) if not done]
        for finished in done:
            self._commit(*finished)
        if done and not self.scoring:
            self.tally.add("time/reward", time.perf_counter() - self._since)
        return lease is not None or bool(done)

    def _sample(self, row: dict[str, Any]) -> Sample:
        start = int(row["prompt_length"])
        tokens = row["tokens"].tolist()
        played = json.loads(row["played"]) if "played" in row else {}
        transcript = self.decode(tokens[start:])
        is_said_last = bool(played)  # of a conversation, a reward judges what was said last
        return Sample(
            prompt=self.decode(tokens[:start]),
            response=self.decode(tokens[start + last_said(row["mask"]) :]) if is_said_last else transcript,
            transcript=transcript,
            tokens=tokens,
            played=played,
            answer=row["answer"],
            meta=json.loads(row["meta"]),
            id=int(row[ID]),
            where=row["where"],
            finish=FINISH[int(row["finish"])],
        )

    def _commit(self, lease: Lease, samples: list[Sample], future: Future[list[Scored]]) -> None:
        scored = future.result()
        outputs = Batch(
            {
                "reward": np.array([r.value for r in scored], np.float32),
                "correct": np.array([r.correct for r in scored], np.uint8),
                "parts": Column.text([json.dumps(dict(r.parts)) for r in scored]),
            }
        )
        if any(r.error for r in scored) and self.scorer.rewards.on_error == "fail":
            raise RewardError(
                next(r.error for r in scored if r.error), "mend the function, or set rewards.on_error=zero (or drop)"
            )
        is_dropped = self.scorer.rewards.on_error == "drop"
        dropped = {int(g) for g, r in zip(lease.batch.values(GROUP), scored) if r.error and is_dropped}
        drop = [int(i) for i, g in zip(lease.batch.values(ID), lease.batch.values(GROUP)) if int(g) in dropped]
        batch = lease.batch
        if committed(lease, outputs, drop):
            self._count(batch, samples, scored)
            if drop:
                self.tally.add("dropped_samples", len(drop))

    def _count(self, batch: Batch, samples: list[Sample], scored: list[Scored]) -> None:
        versions = batch["versions"]
        for i, (sample, result) in enumerate(zip(samples, scored)):
            self.tally.mean("reward", result.value)
            self.tally.mean("accuracy", float(result.correct))
            self.tally.mean("repetition", -repetition(sample))
            for part, value in result.parts.items():
                self.tally.mean(f"reward/{part}", value)
            if result.error is not None:
                self.tally.add("reward_errors", 1)
            self.keep_samples(
                {
                    "id": sample.id,
                    "group": int(batch.values(GROUP)[i]),
                    "prompt": sample.prompt,
                    "response": sample.transcript,
                    "answer": sample.answer,
                    "reward": result.value,
                    "rewards": dict(result.parts),
                    "correct": result.correct,
                    "finish": sample.finish,
                    "versions": sorted({int(v) for v in versions[i]}),
                    **({"error": result.error} if result.error else {}),
                }
            )


class AdvantageWorker:
    """Advantages of complete groups, or of the whole step where the algorithm says so; other rows end here."""

    name = "advantage"
    runs_beside = False
    waits = False

    def __init__(
        self, dock: Dock, algorithm: Algorithm, config: Config, tally: Tally, refill: Callable[[int], int] = lambda n: 0
    ) -> None:
        self.dock, self.algorithm, self.config, self.tally, self.refill = dock, algorithm, config, tally, refill
        self.held: list[Lease] = []
        self.tag: str | None = None
        self.passed = 0  # rows of the step that went on to learning

    def begin(self, first_group: int, tag: str | None) -> None:
        """Groups of one step at a time: what they are compared with, and what replaces them, belongs to it."""
        self.tag, self.passed = tag, 0

    def poll(self) -> bool:
        lease = self.dock.take(self.name, Want(groups=4096, tag=self.tag))
        if lease is not None:
            self.held.append(lease)
        if not self.held or (self.algorithm.wants_whole_step(self.config) and not self._all_here()):
            return lease is not None
        with self.tally.time(self.name):
            self._commit(self.held)
        self.held = []
        return True

    def _all_here(self) -> bool:
        """Whether every sample of the step is held here or has gone on to learning."""
        return sum(h.batch.rows for h in self.held) + self.passed == rows_of(self.dock, self.tag)

    def _commit(self, leases: list[Lease]) -> None:
        batch = Batch.concat([lease.batch for lease in leases])
        outputs, kept = self.algorithm.advantages(batch, self.config), self.algorithm.keep(batch, self.config)
        counted = np.zeros(batch.rows, np.bool_)
        start = 0
        for lease in leases:
            rows = np.arange(start, start + lease.batch.rows)
            dropped = lease.batch.values(ID)[~kept[rows]].tolist()
            counted[rows] = committed(lease, outputs.gather(rows), dropped)
            start += lease.batch.rows
        batch, kept = batch.gather(np.flatnonzero(counted)), kept[counted]
        self.passed += int(kept.sum())
        self._count(batch)
        groups = batch.values(GROUP)
        gone = len(np.unique(groups)) - len(np.unique(groups[kept]))
        if not kept.all():
            self.tally.add("dropped_samples", float((~kept).sum()))
            self.tally.add("dropped_groups", float(gone))
        if gone and self.config.algorithm.dynamic_sampling:
            self.tally.add("refilled_groups", float(self.refill(gone)))

    def _count(self, batch: Batch) -> None:
        if "reward" not in batch:
            return
        rewards, groups = batch.values("reward"), batch.values(GROUP)
        for group in np.unique(groups):
            own = rewards[groups == group]
            self.tally.mean("equal_reward_groups", float(own.max() == own.min()))
            self.tally.mean("reward_std", float(own.std()))


class ScoreWorker:
    """Log-probabilities under a model as it is now: the old policy's, or the reference's."""

    waits = False
    runs_beside = False

    def __init__(self, name: str, column: str, dock: Dock, model: Any, config: Config, tally: Tally) -> None:
        self.name, self.column, self.dock, self.model, self.config, self.tally = (
            name,
            column,
            dock,
            model,
            config,
            tally,
        )
        self.tag: str | None = None

    def begin(self, first_group: int, tag: str | None) -> None:
        """The policy changes with every step, so only this step's samples are scored; the others' models do not."""
        self.tag = tag if self.name == "old_logprobs" else None

    def poll(self) -> bool:
        lease = self.dock.take(self.name, Want(tokens=self.config.train.tokens_per_microbatch * 4, tag=self.tag))
        if lease is None:
            return False
        with self.tally.time(self.name):
            over_ranks = isinstance(self.model, Scores)
            found = self.model.logprobs(lease.batch) if over_ranks else score(self.model, lease.batch, self.config)
            committed(lease, Batch({self.column: found}))
        return True


class ValueWorker:
    """The critic's values, before it learns from this step."""

    name = "values"
    waits = False
    runs_beside = False

    def __init__(self, dock: Dock, critic: Values, config: Config, tally: Tally) -> None:
        self.dock, self.critic, self.config, self.tally = dock, critic, config, tally
        self.tag: str | None = None

    def begin(self, first_group: int, tag: str | None) -> None:
        self.tag = tag

    def poll(self) -> bool:
        lease = self.dock.take(self.name, Want(tokens=self.config.train.tokens_per_microbatch * 4, tag=self.tag))
        if lease is None:
            return False
        with self.tally.time(self.name):
            committed(lease, Batch({"values": self.critic.values(lease.batch)}))
        return True


class LearnWorker:
    """Adds up gradients of the step's groups as they come; updates the weights once an update's last group is in.

    A group's update is fixed by its place in the step, not by when it arrives, and no weight changes before the step's
    last sample is made: so every schedule computes the same step.
    """

    waits = False
    runs_beside = False

    def __init__(
        self,
        dock: Dock,
        learner: LearnEngine,
        config: Config,
        tally: Tally,
        name: str = "learn",
        critic: LearnWorker | None = None,
    ) -> None:
        self.dock, self.learner, self.config, self.tally = dock, learner, config, tally
        self.name, self.critic = name, critic  # the critic's own worker, polled before this one
        self.passes = critic_passes(config) if name == "learn_values" else config.train.passes_per_step
        self.held: list[Lease] = []
        self.has_begun = False  # a gradient has been added that an interruption would waste
        self.begin(0)

    def begin(self, first_group: int, tag: str | None = None) -> None:
        """A new step, whose groups count from `first_group`."""
        self.first_group, self.tag = first_group, tag
        self.version = self.learner.version
        self.accumulated: set[int] = set()
        self.has_begun = False
        self.is_done = False
        self.only_critic = False
        if self.critic is not None:
            self.critic.begin(first_group, tag)
            steps = self.critic.learner.version // (self.config.train.updates_per_step * self.critic.passes)
            self.only_critic = steps < self.config.algorithm.critic.warmup_steps

    def poll(self) -> bool:
        lease = self.dock.take(self.name, Want(groups=4096, tag=self.tag))
        if lease is not None:
            self.held.append(lease)
        all_here = sum(held.batch.rows for held in self.held) == rows_of(self.dock, self.tag)
        if all_here and not self.is_done:
            self._finish_step()
            return True
        if lease is None:
            return False
        self._accumulate_ready()
        return True

    def _update_of(self, batch: Batch) -> Any:
        """Which of the step's updates each row belongs to: by its group's place in the step, or among those kept."""
        updates = self.config.train.updates_per_step
        if self.config.algorithm.dynamic_sampling:
            kept, place = np.unique(batch.values(GROUP), return_inverse=True)
            return place.reshape(-1) * updates // max(1, len(kept))
        return (batch.values(GROUP) - self.first_group) // (self.config.train.prompts_per_step // updates)

    def _accumulate_ready(self) -> None:
        """Of the first update, what fills a micro-batch; the rest waits."""
        if self.only_critic:
            return
        if self.config.algorithm.dynamic_sampling and self.config.train.updates_per_step > 1:
            return  # which update a group belongs to is known once the last one is in
        ready = Batch.concat([held.batch for held in self.held])
        fresh = ~np.isin(ready.values(GROUP), list(self.accumulated))
        rows = np.flatnonzero((self._update_of(ready) == 0) & fresh)
        if ready["tokens"].lengths[rows].sum() >= self.config.train.tokens_per_microbatch:
            self._accumulate(ready.gather(rows))

    def _accumulate(self, batch: Batch) -> None:
        self.has_begun = True
        batch = self._counted_in(batch)
        with self.tally.time(self.name):
            self.learner.accumulate(batch)
        self.accumulated.update(int(g) for g in np.unique(batch.values(GROUP)))

    def _counted_in(self, batch: Batch) -> Batch:
        """In the order of groups, whatever order they came in; told to the tally."""
        self.tally.add("learned_tokens", float(batch["tokens"].lengths.sum()))
        self.tally.add("learned_samples", float(batch.rows))
        if self.config.flow.schedule == "async" and "versions" in batch:
            self._count_age(batch)
        return batch.gather(np.lexsort((batch.values(ID), batch.values(GROUP))))

    def _count_age(self, batch: Batch) -> None:
        """How many steps the weights that made a token are behind those that learn from it."""
        train, versions = self.config.train, batch["versions"]
        age = (self.version - versions.values) / (train.updates_per_step * train.passes_per_step)
        self.tally.mean("staleness", float(age.mean()))
        self.tally.update({"staleness_max": float(age.max())})
        self.tally.mean("sample_versions", float(np.mean([len(np.unique(v)) for v in versions])))

    def _finish_step(self) -> None:
        if self.held and not self.only_critic:
            self._learn(Batch.concat([held.batch for held in self.held]))
        for held in self.held:
            held.commit()
        self.held = []
        self.is_done = True

    def _learn(self, whole: Batch) -> None:
        update_of = self._update_of(whole)
        for _ in range(self.passes):
            for update in range(self.config.train.updates_per_step):
                fresh = ~np.isin(whole.values(GROUP), list(self.accumulated))
                rows = np.flatnonzero((update_of == update) & fresh)
                if len(rows):
                    self._accumulate(whole.gather(rows))
                if self.accumulated:
                    with self.tally.time(self.name):
                        self.tally.update(self._named(self.learner.update()))
                self.accumulated = set()

    def _named(self, metrics: dict[str, float]) -> dict[str, float]:
        return metrics if self.name == "learn" else {f"critic/{name}": value for name, value in metrics.items()}


def rows_of(dock: Dock, tag: str | None) -> int:
    """Rows of a step that are in the dock, wherever they stand."""
    state = dock.state()
    return state.rows if tag is None else state.tags.get(tag, 0)


def stacks_of(workers: list[Worker], since: float) -> str:
    """Who waits for whom, for a run that stands still."""
    waiting = ", ".join(w.name for w in workers if w.waits) or "no worker"
    return f"nothing has moved for {time.monotonic() - since:.0f} s; under way: {waiting}"
