"""One worker's state: its models, engine, scorer and feed, and the workers of its stages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from tidemill import device as devices
from tidemill.algorithms.api import Algorithm
from tidemill.batch import Batch
from tidemill.cluster.worker.cut import Calls, Team
from tidemill.cluster.worker.engine_ranks import Follower, LeadEngine
from tidemill.cluster.worker.learners import World
from tidemill.cluster.worker.stages import STAGES
from tidemill.data.survey import open_rows
from tidemill.dock import Dock
from tidemill.estimate.handover import HandedOver
from tidemill.flow.ahead import Ahead
from tidemill.flow.evaluate import averaged, decoder, evaluate, play
from tidemill.flow.feed import Feed, encoder_of
from tidemill.flow.handover import Away, Handover, Leaving, kept_tensors
from tidemill.flow.records import Activity, Evaluation
from tidemill.flow.reference import ReferenceKeeper
from tidemill.flow.stages.learning import LearnWorker
from tidemill.flow.stages.rolling import RolloutWorker
from tidemill.flow.stages.scoring import AdvantageWorker, ScoreWorker
from tidemill.flow.stages.stage import Worker
from tidemill.flow.tally import Tally
from tidemill.learn.model import MeshModel
from tidemill.models.buffers import carried
from tidemill.models.load import LoadedModel
from tidemill.recipe.config import Config
from tidemill.reward.score import Scorer
from tidemill.rollout.engine import Completion, Partial, RolloutEngine
from tidemill.rollout.native.ranks.replicas import Replicas
from tidemill.serve.make import close_engine, make_engine


@dataclass(frozen=True, slots=True)
class _Paused:
    """Samples that an engine was making when it was asked for something else."""

    unfinished: Sequence[Partial] = ()
    done: Sequence[Completion] = ()


class _EvaluatingEngine:
    """Reports each engine step, so that a long evaluation is not mistaken for a hang."""

    def __init__(self, engine: RolloutEngine, moved_on: Callable[[], None]) -> None:
        self._engine, self._moved_on = engine, moved_on

    def step(self) -> list[Completion]:
        self._moved_on()
        return self._engine.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@dataclass(slots=True)
class WorkerState:
    """A worker's state. What its post does not need is None."""

    stages: tuple[str, ...]
    config: Config
    algorithm: Algorithm
    dock: Dock
    tally: Tally
    world: World
    device: torch.device
    is_alone: bool  # the only process of the run: no other learns with it, and no lease is lost
    workers: dict[str, Worker] = field(default_factory=dict)  # by stage
    rollout: RolloutWorker | None = None  # those of them that are called by name
    advantage: AdvantageWorker | None = None
    learn: LearnWorker | None = None
    learn_values: LearnWorker | None = None
    loaded: LoadedModel | None = None  # a whole model: the learner's, or what an engine serves
    tokenizer: Any = None
    learner: Any = None  # `learn.engine.Learner`, or a stand-in for its ranks
    critic: Any = None
    is_cut: bool = False  # a pass through the learner's model is an exchange between ranks
    reference: MeshModel | None = None  # of a learner that is cut over ranks
    frozen: dict[str, Any] = field(default_factory=dict)  # frozen models, by the stage that scores with them
    make_reference: Callable[[], Any] | None = None
    calls: Calls | None = None  # work that ranks do together
    teams: dict[str, Team] = field(
        default_factory=dict
    )  # of learner, critic and reference: each may be cut differently
    parameters: int = 0  # of the whole model
    away: Away | None = None  # learning's tensors in other processes, which can leave the device; None: all are here
    engine: RolloutEngine | None = None
    lead: LeadEngine | None = None  # an engine of several ranks: this rank is called, the others follow
    follower: Follower | None = None
    engine_group: Any = None
    engine_part: Replicas | None = None  # this rank's part of such an engine
    scorer: Scorer | None = None
    feed: Feed | None = None
    ahead: Ahead | None = None  # of the feeder: steps whose rows are in the dock
    puts: FeederDock | None = None
    keeper: ReferenceKeeper | None = None
    handed_over: HandedOver = "never"
    turns: Handover | None = None  # where rollout and learning share the device
    kept_samples: list[dict[str, Any]] = field(default_factory=list)
    follows: bool = False  # another rank of an engine
    evaluated: int = 0  # steps that evaluations took, and outcomes of their answers

    @property
    def shares_tensors(self) -> bool:
        """Say whether the engine serves the learner's own tensors."""
        return self.learner is not None and self.engine is not None and not self.is_cut

    @property
    def is_shared(self) -> bool:
        """Say whether this process holds one rank's share of an engine."""
        return self.lead is not None or self.follows

    @property
    def version(self) -> int:
        """The version of the weights that are trained, or served, here."""
        if self.learner is not None:
            return int(self.learner.version)
        served = self.follower.engine if self.follower is not None else self.engine
        return served.version if served is not None else -1

    # Stages

    def make_workers(self) -> None:
        """Make a worker for each of its stages."""
        self.calls = Calls(self.world) if self.learner is not None else None
        self.workers = {}
        for stage in self.stages:
            self.workers[stage] = STAGES[stage](self)
        if self.keeper is None:
            self.keeper = ReferenceKeeper.of(self.config, list(self.workers.values()))
            return
        self.keeper.reference = cast(ScoreWorker, self.workers["reference"])
        if self.advantage is not None:
            self.keeper.replace(self.advantage)

    def take_turns(self) -> None:
        """Let rollout and learning take turns with the device's memory, where the recipe says so."""
        if self.loaded is None or self.handed_over == "never":
            return
        own = Leaving(self.device, lambda: kept_tensors(self.loaded.model, self.device, self._kept()))  # type: ignore[union-attr]
        away = self.away if self.away is not None else own
        # Captured graphs hold the addresses of an engine's weights; engines over ranks have none.
        leaves = self.is_cut and (self.is_shared or self.device.type == "cpu")
        copy = Leaving(self.device, lambda: carried(self.loaded.model).values()) if leaves else None  # type: ignore[union-attr]
        device = devices.pick(str(self.device))
        self.turns = Handover(self.engine, self.tally, device, self.handed_over, away, copy)

    def rolling(self) -> None:
        """Announce that rollout works next."""
        if self.turns is not None:
            self.turns.rolling()

    def publishing(self) -> None:
        """Announce that weights go from the learner to the engine next."""
        if self.turns is not None:
            self.turns.publishing()

    def learning(self) -> None:
        """Announce that something else works next, or reads the learner's weights."""
        if self.turns is not None:
            self.turns.learning()

    def _kept(self) -> Iterator[Tensor]:
        """Return the tensors that learning keeps on the device."""
        for model in (self.learner, self.critic, self.reference, *self.frozen.values()):
            if model is not None:
                yield from model.held()

    def open_feed(self) -> None:
        """Mark that no step has rows in the dock."""
        if self.feed is not None:
            self.puts = FeederDock(self)
            self.ahead = Ahead(self.feed, cast(Dock, self.puts), self.config)

    def reconnect(self, dock: Dock, tally: Tally) -> None:
        """Use the same models and engine with another dock: nothing is held, nothing counted."""
        self.dock.close()
        self.tally.close()
        if self.engine is not None:
            self.engine.pause()  # drop what it was making
            while self.engine.has_work:
                self.engine.step()  # and what it had finished
        self.dock, self.tally = dock, tally
        self.open_feed()
        self.kept_samples.clear()
        self.make_workers()
        if self.turns is not None:
            self.turns.tally = tally

    # Evaluating

    def moved_on(self) -> None:
        """Count that an evaluation has moved. Called by several threads; two calls that count as one do no harm."""
        self.evaluated += 1

    def evaluate(self, size: int, samples: int, tell: Callable[[Activity], None]) -> Evaluation:
        assert self.loaded is not None
        if self.config.model.policy is not None:
            player = self.engine or make_engine(self.loaded, self.config)
            with averaged(self.learner, player):
                return play(player, size, tell)
        engine, paused = self.engine, _Paused()
        is_sole = self.lead is not None or self.config.flow.carry_over > 0  # no room for a second, for a moment's work
        if is_sole and engine is not None:
            paused = _Paused(engine.pause(), engine.step() if engine.has_work else [])
        elif (
            engine is None or engine.has_work
        ):  # rollout continues while others learn: what it has under way is not ours
            own = self.config.rollout.model_copy(update={"engine": "native"})
            engine = make_engine(self.loaded, self.config.model_copy(update={"rollout": own}))
        _, held_out = open_rows(self.config)
        encode, decode = (
            encoder_of(self.config, self.tokenizer),
            decoder(self.tokenizer),
        )
        watched = cast(RolloutEngine, _EvaluatingEngine(engine, self.moved_on))
        try:
            with self._scoring() as scorer, averaged(None if self.is_cut else self.learner, engine):
                seen = evaluate(
                    watched, held_out, encode, decode, scorer, self.config, size=size, samples=samples, tell=tell
                )
        finally:
            if engine is not self.engine:
                close_engine(engine)
        if is_sole and self.engine is not None and self.rollout is not None:
            engine.resume(paused.unfinished)
            self.rollout.take_in(paused.done)
        return seen

    @contextlib.contextmanager
    def _scoring(self) -> Iterator[Scorer]:
        """Return its own scorer, or one for the length of the evaluation."""
        if self.scorer is not None:
            yield self.scorer
            return
        with Scorer(self.config.rewards, self.moved_on, self.config.device.partition(":")[0]) as scorer:
            yield scorer
        if self.config.rewards.models:  # a trained reward model stays on the device no longer than that
            from tidemill.reward.verifiers import model

            model.close_all()

    def close(self) -> None:
        if self.scorer is not None:
            self.scorer.close()
        if self.learner is not None:
            self.learner.close()
        close_engine(self.engine)
        self.dock.close()
        self.tally.close()


class FeederDock:
    """The feeder's dock: remembers the rows of steps under way, so that lost bytes can be put again."""

    def __init__(self, state: WorkerState) -> None:
        self.state = state
        self.kept: dict[str, list[Batch]] = {}

    def put(self, rows: Batch, tag: str = "") -> None:
        self.kept.setdefault(tag, []).append(rows)
        self.state.dock.put(rows, tag)

    def forget(self, tags: Collection[str]) -> None:
        """Forget rows of steps that are over."""
        self.kept = {tag: rows for tag, rows in self.kept.items() if tag in tags}

    def again(self) -> None:
        """Put the rows again. Rows that the dock still has are not added twice."""
        for tag, listed in self.kept.items():
            for rows in listed:
                self.state.dock.put(rows, tag)
