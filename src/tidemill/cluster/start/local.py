"""The local executor: every role in this process.

Colocated, the rollout engine reads the learner's own tensors and nothing moves. Separated, it has a thread of its own
and its own copy of the weights, and works while the others do.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from tidemill import device as devices
from tidemill.algorithms.api import Algorithm
from tidemill.algorithms.registry import get as get_algorithm
from tidemill.cluster.start.ranked import RankedLearner, RankedRole
from tidemill.data.prompts import PromptTokens
from tidemill.data.source import Source, open_source
from tidemill.device import determinism, host
from tidemill.dock import LocalDock
from tidemill.errors import ConfigError
from tidemill.estimate import handover as turns
from tidemill.flow.adjust import adjust, adjusted
from tidemill.flow.ahead import Ahead, OpenStep, staleness_limit
from tidemill.flow.beside import Beside, EveryStep
from tidemill.flow.dump import Dump, DumpingDock
from tidemill.flow.evaluate import averaged, decoder, evaluate, revealer
from tidemill.flow.feed import FEEDS, Feed
from tidemill.flow.handover import Away, Handover, state_of, take_turns
from tidemill.flow.learning import LearnWorker
from tidemill.flow.records import Activity, Evaluation
from tidemill.flow.reference import ReferenceKeeper
from tidemill.flow.rewarding import RewardWorker
from tidemill.flow.rolling import RolloutWorker
from tidemill.flow.schedule import SCHEDULES
from tidemill.flow.scoring import AdvantageWorker, ScoreWorker
from tidemill.flow.stage import Worker
from tidemill.flow.tally import Counted, Tally, together
from tidemill.flow.weights import OwnCopy
from tidemill.flow.workers import Stopped
from tidemill.learn import checkpoint
from tidemill.learn.api import LearnEngine
from tidemill.learn.critic import ValueLearner
from tidemill.learn.engine import Learner, freeze
from tidemill.learn.model import MeshModel
from tidemill.learn.value_model import ValueModel
from tidemill.models import routing
from tidemill.models.load import LoadedModel, keep_definition, load, save_folder
from tidemill.observe import health
from tidemill.observe.metrics import MetricsWriter
from tidemill.recipe.config import Config
from tidemill.reward.score import Scorer
from tidemill.rollout.engine import RolloutEngine
from tidemill.rollout.make import make_engine

DOING = {  # what a stage is called while it works
    "reward": "scoring", "reference": "asking the reference", "advantage": "comparing rewards", "learn": "learning",
    "old_logprobs": "scoring under the old policy", "teacher": "asking the teacher", "values": "asking the critic",
    "learn_values": "teaching the critic",
}  # fmt: skip


@dataclass(slots=True)
class LocalWorkers:
    """Everything a run's loop speaks to, wired."""

    config: Config
    loaded: LoadedModel
    algorithm: Algorithm
    dock: LocalDock
    feed: Feed
    ahead: Ahead
    engine: RolloutEngine  # reads the learner's tensors: rollout's when colocated, evaluation's always
    learner: LearnEngine
    scorer: Scorer
    stages: list[Worker]
    learn: LearnWorker
    tally: Tally
    held_out: Source
    turns: Handover
    critic: ValueLearner | RankedRole | None = None
    own_copy: OwnCopy | None = None  # of the weights, for a rollout that is separated
    kept_samples: list[dict[str, Any]] = field(default_factory=list)
    kl: ReferenceKeeper | None = None
    dump: Dump | None = None
    history: list[dict[str, float]] = field(default_factory=list)  # metrics of the steps made by this process
    told: set[str] = field(default_factory=set)  # warnings given already
    counted: dict[str, int] = field(default_factory=dict)  # what the dock had counted when it was last asked

    @property
    def parameters(self) -> int:
        return self.loaded.parameters

    @property
    def bad_rows(self) -> int:
        return len(self.feed.bad_rows)

    def step(self, number: int, stop: Callable[[], bool]) -> None:
        with self.dump.step(number) if self.dump is not None else contextlib.nullcontext():
            self._step(number, stop)

    def _step(self, number: int, stop: Callable[[], bool]) -> None:
        at_boundary = self.feed.state()
        self.feed.stop = stop
        self.begin(number)
        self.feed.stop = lambda: False  # rows that replace dropped groups belong to a step that has begun
        try:
            SCHEDULES[self.config.flow.schedule](self.stages, self.learn, stop, stall_s=2 * self.config.flow.lease_s)
        except Stopped:
            if not self.ahead.lead:  # else the rows stay in the dock, and the dock in the checkpoint
                self.feed.restore(at_boundary)
            raise
        self.publish()

    def measure(self) -> dict[str, float]:
        counted = [self.tally.drain(), Counted.of_samples(self.dock.counted())]
        return together(counted) | {"version": float(self.learner.version)}

    def write_samples(self, step: int, metrics: MetricsWriter) -> None:
        # Those on which a reward failed first; not in the order rewards came back.
        kept = sorted(self.kept_samples, key=lambda sample: ("error" not in sample, sample["id"]))
        metrics.samples(step, kept[: self.config.observe.samples_per_step])
        self.kept_samples.clear()

    def activity(self) -> Activity | None:
        state = self.dock.state()
        rolled = state.stages.get("rollout")
        if self.learn.has_begun or rolled is None:
            return Activity("learning", state.stages["learn"].done, state.rows)
        if rolled.done < state.rows:
            return Activity("rolling out", rolled.done, state.rows)
        waiting = next((name for name, c in state.stages.items() if c.ready or c.leased), "learn")
        return Activity(DOING.get(waiting, waiting), state.stages[waiting].done, state.rows)

    def evaluate(self, size: int, samples: int, tell: Callable[[Activity], None] = lambda activity: None) -> Evaluation:
        self.turns.rolling()
        with averaged(self.learner, self.engine):
            return evaluate(
                self.engine,
                self.held_out,
                self.feed.encode,
                decoder(self.loaded.tokenizer),
                self.scorer,
                self.config,
                size=size,
                samples=samples,
                tell=tell,
            )

    def begin(self, step: int) -> OpenStep:
        """The rows of every step that may begin now enter; the workers turn to this one's."""
        opened = self.ahead.begin(step)
        for worker in self.stages:
            worker.begin(opened.first_group, self.ahead.tag(step))
        return opened

    def save(
        self, folder: Path, step: int, state: dict[str, Any], *, best: bool = False, metric: float | None = None
    ) -> None:
        """At a step boundary. Samples of later steps that are in the dock go with it; half-made ones are made again.
        Ranks write while training goes on, until there is no more of it."""
        self.turns.learning()
        own: dict[str, Any] = {"feed": self.feed.state()}
        more: dict[str, torch.Tensor] = {}
        if self.ahead.lead:
            own["dock"], arrays = self.dock.snapshot()
            own["ahead"] = self.ahead.state()
            more = as_tensors(arrays)
        if self.kl is not None:
            moved, own["kl"] = self.kl.state()
            more |= moved
        self.learner.save(
            folder, step, own | state, more=more, critic=self.critic, keep=self.config.checkpoint.keep, best=best,
            metric=metric, wait=step >= self.config.train.steps,
        )  # fmt: skip

    def restore(self, path: Path) -> dict[str, Any]:
        self.turns.learning()
        state = self.learner.load(path, self.critic)
        if self.kl is not None:
            self.kl.restore(path, state["kl"])
        self.feed.restore(state["feed"])
        if "dock" in state:
            self.dock.restore(state["dock"], as_arrays(checkpoint.load(path, "dock.", "words.")[0]))
            self.ahead.restore(state["ahead"])
        self.publish()
        return state

    def rewind(self) -> None:
        raise NotImplementedError("the learner lives in this process: it is not lost without it")

    def keep_definition(self, run: Path) -> None:
        keep_definition(self.loaded, run)

    def save_model(self, folder: Path) -> None:
        with self.learner.averaged():
            save_folder(self.loaded.model, self.loaded.tokenizer, folder)

    def after_step(self, step: int, measured: dict[str, float]) -> list[str]:
        """What changes between steps: level of problems, KL coefficient, reference. Gives new warnings, in words."""
        self.feed.report(measured)
        if self.kl is not None:
            if self.kl.moves_after(step):
                self.turns.learning()
            self.kl.after_step(step, measured, self.loaded.model)
        self.history.append(measured)
        fresh = [sign for sign in health.signs(self.history) if sign.sign not in self.told]
        self.told |= {sign.sign for sign in fresh}
        return [sign.sentence for sign in fresh]

    def adjust(self, changes: Mapping[str, float]) -> str:
        """Hold other values of some settings from now on; a sentence where that cannot be."""
        if not (refusal := adjust(self.config, self.stages, changes)):
            self.config = adjusted(self.config, changes)
        return refusal

    def publish(self) -> None:
        """The learner's weights are what rollout serves from now on."""
        self.learner.publish()
        if not self.turns.serve(self.learner.version):
            self.engine.load(None, self.learner.version)
        if self.own_copy is not None:
            with self.tally.time("publish"):
                self.own_copy.publish(self.learner.version)
        self.dock.advance(self.learner.version)
        if self.ahead.lead:
            self._count_losses()

    def _count_losses(self) -> None:
        """Samples that the dock refused for their age, and leases that ran out, since the last step."""
        state = self.dock.state()
        now = {"stale_samples": state.stale, "expired_leases": state.expired}
        for name, count in now.items():
            self.tally.add(name, float(count - self.counted.get(name, 0)))
        self.counted = now

    def close(self) -> None:
        for worker in self.stages:
            if isinstance(worker, Beside):
                worker.close()
        self.learner.close()
        self.scorer.close()
        self.dock.close()


def start(config: Config, model_path: Path | None = None) -> LocalWorkers:
    """Load the model and join the roles. `model_path`: a finished warm start."""
    is_separated = config.flow.is_separated
    # Two threads that compute at once share the cores.
    torch.set_num_threads(config.threads or max(1, host.cores() // (2 if is_separated else 1)))
    if config.deterministic:
        determinism.demand()
    device = devices.pick(config.device)
    algorithm = get_algorithm(config.algorithm.name)
    graph = algorithm.graph(config)
    training, held_out = open_source(config.data, config.seed)
    handed_over = turns.chosen(config, turns.made(config.model, model_path), device)
    loaded = load(config.model, seed=config.seed, device=device.torch_device, path=model_path)
    check_window(config, loaded)
    with contextlib.ExitStack() as undo:
        scorer = undo.enter_context(Scorer(config.rewards, device=config.device))
        encode = PromptTokens(loaded.tokenizer, config.data, config.rollout.max_new_tokens)
        feed = FEEDS[algorithm.input_kind](training, config, encode, algorithm.greedy_rows)
        train = config.train
        updates = train.steps * train.updates_per_step * train.passes_per_step
        served = copy.deepcopy(loaded.model).requires_grad_(False) if is_separated else None  # before adapters come
        if served is not None:
            routing.make_room(served, config.learn.moe)
        critic: ValueLearner | RankedRole | None = None
        learner: LearnEngine
        ranked = None
        if config.learn.parallel.ranks > 1:
            learner = ranked = RankedLearner(loaded.model, config, updates, model_path)
            undo.callback(learner.close)
            critic = ranked.critic(updates) if algorithm.has_critic else None
        elif needs_values(algorithm):
            shares_trunk = algorithm.has_critic and config.algorithm.critic.trunk == "shared"
            critic = own = ValueLearner(ValueModel(loaded.model, shares_trunk), config, algorithm, updates)
            learner = own if algorithm.learns_values else Learner(loaded.model, config, algorithm, updates)
        else:
            learner = Learner(loaded.model, config, algorithm, updates)
        # A separated engine that is a server of its own would be started twice: evaluation then has the native one.
        judge = config.rollout.model_copy(update={"engine": "native"}) if served is not None else config.rollout
        engine = make_engine(loaded, config.model_copy(update={"rollout": judge}))
        dock = LocalDock(
            graph.stages,
            source=graph.source,
            lease_s=config.flow.lease_s,
            max_staleness=staleness_limit(config),
            stale="requeue",
            renews=True,
        )
        dump = None
        if config.observe.dump:
            run = Path(config.folder).expanduser() / config.name
            dump = Dump(run, config.observe.dump, [stage.name for stage in graph.stages])
            dock = cast(LocalDock, DumpingDock(dock, dump))
            learner.show = dump.tensors
        ahead = Ahead(feed, dock, config)
        tally = Tally()
        own_copy = None

        def rollout() -> Worker:
            nonlocal own_copy
            if served is None:
                return RolloutWorker(dock, engine, config, tally)
            own = make_engine(replace(loaded, model=served), config)
            own_copy = OwnCopy(loaded.model, served, own, config.flow.unfinished_samples, config.reshard.verify)
            return Beside(RolloutWorker(dock, own, config, tally, own_copy), dock)

        def advantage() -> Worker:
            settings = config.algorithm
            looks_ahead = settings.dynamic_sampling and settings.kl.target is None
            if not looks_ahead or not ahead.lead or algorithm.wants_whole_step(config):
                return AdvantageWorker(dock, algorithm, config, tally, ahead.refill)
            workers = [
                AdvantageWorker(dock, algorithm, config, tally, partial(ahead.refill, tag=tag)) for tag in ahead.tags
            ]
            for worker, tag in zip(workers, ahead.tags, strict=True):
                worker.begin(0, tag)
            return EveryStep("advantage", workers)

        kept: list[dict[str, Any]] = []
        learn_values = (
            LearnWorker(dock, critic, config, tally, "learn_values") if algorithm.has_critic and critic else None
        )
        learn = LearnWorker(dock, learner, config, tally, critic=learn_values)

        def reference() -> Any:
            """On the learner's ranks too, unless it moves with the policy or is rounded, which is done here."""
            kl = config.algorithm.kl
            if ranked is not None and not kl.reset_every and kl.weights == "same":
                return ranked.reference(model_path)
            return MeshModel(freeze(loaded.model, config.algorithm.kl.weights), config, is_ready=True)

        makers: dict[str, Callable[[], Worker]] = {
            "rollout": rollout,
            "reward": lambda: RewardWorker(
                dock, scorer, decoder(loaded.tokenizer), tally, kept.append, revealer(loaded.tokenizer)
            ),
            "old_logprobs": lambda: ScoreWorker("old_logprobs", "old_logprobs", dock, learner, config, tally),
            "teacher": lambda: ScoreWorker(
                "teacher",
                "teacher_logprobs",
                dock,
                MeshModel(teacher(config, device.torch_device), config, is_ready=True),
                config,
                tally,
            ),
            "reference": lambda: ScoreWorker("reference", "ref_logprobs", dock, reference(), config, tally),
            "advantage": advantage,
            "learn": lambda: learn,
        }
        if critic is not None and learn_values is not None:
            makers |= {
                "values": lambda: ScoreWorker("values", "values", dock, critic, config, tally),
                "learn_values": lambda: learn_values,
            }
        stages = [makers[stage.name]() for stage in graph.stages]
        away: Away | None = ranked
        if handed_over == "all" and away is None:
            away = state_of(loaded.model, device.torch_device, lambda: stages)
        taken = Handover(engine, tally, device, handed_over, away)
        take_turns(stages, taken)
        undo.pop_all()
    own_critic = critic if algorithm.has_critic else None  # a reward model is the learner itself
    return LocalWorkers(
        *(config, loaded, algorithm, dock, feed, ahead, engine, learner, scorer, stages, learn, tally, held_out),
        turns=taken,
        critic=own_critic,
        own_copy=own_copy,
        kl=ReferenceKeeper.of(config, stages),
        kept_samples=kept,
        dump=dump,
    )


def as_tensors(arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, torch.Tensor]:
    """A dock's arrays for a checkpoint, which knows no unsigned words of 64 bits."""
    return {
        f"{'words' if a.dtype == np.uint64 else 'dock'}.{name}": torch.from_numpy(
            np.array(a.view(np.int64) if a.dtype == np.uint64 else a)
        )
        for name, a in arrays.items()
    }


def as_arrays(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    plain = {n.removeprefix("dock."): t.numpy() for n, t in tensors.items() if n.startswith("dock.")}
    words = {n.removeprefix("words."): t.numpy() for n, t in tensors.items() if n.startswith("words.")}
    return plain | {name: array.view(np.uint64) for name, array in words.items()}


def needs_values(algorithm: Algorithm) -> bool:
    return algorithm.has_critic or algorithm.learns_values


def teacher(config: Config, device: torch.device) -> Any:
    """The model that on-policy distillation learns from."""
    path = config.algorithm.teacher
    if path is None:
        raise ConfigError(
            f"algorithm {config.algorithm.name} needs a teacher", "set algorithm.teacher to a model folder"
        )
    return load(config.model.model_copy(update={"path": path}), seed=0, device=device).model.requires_grad_(False)


def check_window(config: Config, loaded: LoadedModel) -> None:
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if longest > loaded.window:
        raise ConfigError(
            f"data.max_prompt_tokens ({config.data.max_prompt_tokens}) + rollout.max_new_tokens "
            f"({config.rollout.max_new_tokens}) = {longest}, but the model's window is {loaded.window} tokens",
            f"lower one of them by {longest - loaded.window}",
        )


def evaluate_trained(
    loaded: LoadedModel,
    config: Config,
    *,
    size: int,
    samples: int,
    tell: Callable[[Activity], None] = lambda activity: None,
) -> Evaluation:
    """Measure a model that is not being trained."""
    _, held_out = open_source(config.data, config.seed)
    with Scorer(config.rewards, device=config.device) as scorer:
        return evaluate(
            make_engine(loaded, config),
            held_out,
            PromptTokens(loaded.tokenizer, config.data),
            decoder(loaded.tokenizer),
            scorer,
            config,
            size=size,
            samples=samples,
            tell=tell,
        )
