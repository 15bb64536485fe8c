"""Equipment: from a post to the workers of its stages, with the models, engine, scorer and feed that they need."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from transformers import GenerationConfig

from tidemill import device as devices
from tidemill.algorithms.api import Algorithm
from tidemill.algorithms.registry import get as get_algorithm
from tidemill.batch import Batch
from tidemill.cluster.assignment import Assignment
from tidemill.cluster.driver.placement import LEARNER
from tidemill.cluster.report import StoreAddress
from tidemill.cluster.start.local import check_window, needs_values, teacher
from tidemill.cluster.worker.cut import Calls, CutScoreWorker, Team
from tidemill.cluster.worker.engine_ranks import Follower, LeadEngine, Notes, engine_groups
from tidemill.cluster.worker.kept_tally import KeptTally
from tidemill.cluster.worker.learners import RankLearnWorker, World
from tidemill.cluster.worker.weights import Follow
from tidemill.data.prompts import PromptTokens
from tidemill.data.source import open_source
from tidemill.device import determinism
from tidemill.device.collective import backend
from tidemill.dock import Dock
from tidemill.dock.address import Address
from tidemill.dock.client import RemoteDock
from tidemill.errors import ConfigError
from tidemill.estimate import handover as turns
from tidemill.estimate.handover import HandedOver
from tidemill.flow.ahead import Ahead
from tidemill.flow.evaluate import averaged, decoder, evaluate, revealer
from tidemill.flow.feed import FEEDS, Feed
from tidemill.flow.handover import Handover, state_of, take_turns
from tidemill.flow.records import Evaluation
from tidemill.flow.reference import ReferenceKeeper
from tidemill.flow.rewarding import RewardWorker
from tidemill.flow.rolling import RolloutWorker
from tidemill.flow.scoring import AdvantageWorker, ScoreWorker
from tidemill.flow.stage import Worker
from tidemill.learn.build import RankPlace
from tidemill.learn.build import critic as cut_critic
from tidemill.learn.build import learner as cut_learner
from tidemill.learn.build import reference as cut_reference
from tidemill.learn.checkpoint.model_folder import empty_model, materialise
from tidemill.learn.critic import ValueLearner
from tidemill.learn.engine import Learner, freeze
from tidemill.learn.model import MeshModel
from tidemill.learn.parallel import mesh
from tidemill.learn.parallel.cuts import elements
from tidemill.learn.value_model import ValueModel
from tidemill.models import routing
from tidemill.models.box import find
from tidemill.models.load import LoadedModel, load, load_tokenizer, wrap
from tidemill.recipe.config import Config
from tidemill.reward.score import Scorer
from tidemill.rollout.engine import Completion, Partial, RolloutEngine
from tidemill.rollout.make import make_engine, make_plain, with_turns
from tidemill.rollout.native.forward import parallel


@dataclass(frozen=True, slots=True)
class _Paused:
    """What an engine was making when it was asked for something else."""

    half_made: Sequence[Partial] = ()
    done: Sequence[Completion] = ()


class _Judged:
    """An engine that evaluates: each step is told, so that a long evaluation is not taken for one that hangs."""

    def __init__(self, engine: RolloutEngine, kit: WorkerState) -> None:
        self._engine, self._kit = engine, kit

    def step(self) -> list[Completion]:
        self._kit.moved_on()
        return self._engine.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@dataclass(slots=True)
class WorkerState:
    """What one process works with; what its post does not need is None."""

    stages: tuple[str, ...]
    config: Config
    algorithm: Algorithm
    dock: RemoteDock
    tally: KeptTally
    world: World
    device: torch.device
    workers: dict[str, Worker] = field(default_factory=dict)  # by stage
    loaded: LoadedModel | None = None  # a whole model: the learner's own, or what an engine serves
    tokenizer: Any = None
    learner: Learner | None = None
    critic: Learner | None = None
    reference: MeshModel | None = None  # on the ranks of a learner that is cut
    calls: Calls | None = None  # what ranks do together
    teams: dict[str, Team] = field(default_factory=dict)  # of learner, critic and reference: each may be cut otherwise
    parameters: int = 0  # of the whole model
    engine: RolloutEngine | None = None
    lead: LeadEngine | None = None  # of several ranks: this one is told, the others follow
    follower: Follower | None = None
    engine_group: Any = None
    scorer: Scorer | None = None
    feed: Feed | None = None
    ahead: Ahead | None = None  # of the feeder: whose rows are in the dock
    puts: Puts | None = None
    keeper: ReferenceKeeper | None = None
    handed_over: HandedOver = "never"
    turns: Handover | None = None  # where rollout and learning share the device
    kept_samples: list[dict[str, Any]] = field(default_factory=list)
    follows: bool = False  # another rank of an engine
    judged: int = 0  # steps that evaluations took, and outcomes of their answers

    @property
    def learn(self) -> RankLearnWorker | None:
        return cast("RankLearnWorker | None", self.workers.get("learn"))

    @property
    def is_cut(self) -> bool:
        """Whether a pass through the learner's model is an exchange between ranks."""
        return self.learner is not None and not self.learner.meshes.computes_alone

    @property
    def shares_tensors(self) -> bool:
        """Whether the engine serves the learner's own tensors."""
        return self.learner is not None and self.loaded is not None and self.learner.model is self.loaded.model

    @property
    def is_shared(self) -> bool:
        """Whether this process holds one rank's share of an engine."""
        return self.lead is not None or self.follows

    @property
    def version(self) -> int:
        """Of the weights that are learned, or served, here."""
        if self.learner is not None:
            return self.learner.version
        served = self.follower.engine if self.follower is not None else self.engine
        return served.version if served is not None else -1

    def open_feed(self) -> None:
        """Nothing of any step is in the dock."""
        if self.feed is not None:
            self.puts = Puts(self)
            self.ahead = Ahead(self.feed, cast(Dock, self.puts), self.config)

    def moved_on(self) -> None:
        """An evaluation has. Told by several threads; where two count as one, it has moved all the same."""
        self.judged += 1

    def evaluate(self, size: int, samples: int) -> Evaluation:
        assert self.loaded is not None
        engine, paused = self.engine, _Paused()
        if self.lead is not None and engine is not None:  # its ranks have room for one engine
            paused = _Paused(engine.pause(), engine.step() if engine.has_work else [])
        elif engine is None or engine.has_work:  # rollout goes on while others learn: what it has under way is not ours
            own = self.config.rollout.model_copy(update={"engine": "native"})
            engine = make_engine(self.loaded, self.config.model_copy(update={"rollout": own}))
        _, held_out = open_source(self.config.data, self.config.seed)
        encode = PromptTokens(self.tokenizer, self.config.data)
        kind = self.config.device.partition(":")[0]
        with (
            self._judging(),
            Scorer(self.config.rewards, self.moved_on, kind) as scorer,
            averaged(self.learner if self.shares_tensors else None, engine),
        ):
            seen = evaluate(
                _Judged(engine, self),
                held_out,
                encode,
                decoder(self.tokenizer),
                scorer,
                self.config,
                size=size,
                samples=samples,
            )
        rollout = self.workers.get("rollout")
        if self.lead is not None and isinstance(rollout, RolloutWorker):
            engine.resume(paused.half_made)
            rollout.take_in(paused.done)
        return seen

    @contextlib.contextmanager
    def _judging(self) -> Iterator[None]:
        """A trained reward model that only an evaluation wants here is on the device no longer than that."""
        yield
        if self.config.rewards.models and self.scorer is None:
            from tidemill.reward import model  # has been imported, if there was one

            model.close_all()

    def reconnect(self, dock: RemoteDock, tally: KeptTally) -> None:
        """The same models and engine at another dock: nothing is held, nothing counted."""
        self.dock.close()
        self.tally.close()
        if self.engine is not None:
            self.engine.pause()  # what it was making is dropped
            while self.engine.has_work:
                self.engine.step()  # and what it had finished
        self.dock, self.tally = dock, tally
        self.open_feed()
        self.kept_samples.clear()
        before, self.workers = self.workers, {}
        makers = _makers(self)
        for stage, worker in before.items():
            if isinstance(worker, ScoreWorker):  # the frozen reference stays as it is
                worker.dock, worker.tally = dock, self.tally
                self.workers[stage] = worker
            else:
                self.workers[stage] = makers[stage]()
        if self.keeper is not None:
            advantage = self.workers.get("advantage")
            if isinstance(advantage, AdvantageWorker):
                self.keeper.replace(advantage)
        if self.turns is not None:
            self.turns.tally = tally
            take_turns(self.workers.values(), self.turns)

    def close(self) -> None:
        if self.scorer is not None:
            self.scorer.close()
        self.dock.close()


def counts_of(task: Assignment, dock: Address) -> KeptTally:
    return KeptTally(task.logs / f"{task.post.name}.counts", dock.ledger)


def build_worker(task: Assignment, dock: RemoteDock) -> WorkerState:
    config, post = task.config, task.post
    torch.set_num_threads(config.threads or 1)  # several processes share the node's cores
    if config.deterministic:
        determinism.demand()
    place = devices.pick(config.device.partition(":")[0])  # which one, whoever placed it has decided
    device = place.torch_device
    algorithm = get_algorithm(config.algorithm.name)
    group = post.group
    world = World(post.rank, group.ranks) if group.name == LEARNER else World(post.part, group.engine_ranks)
    kit = WorkerState(post.stages, config, algorithm, dock, counts_of(task, task.dock), world, device)
    if group.has_engine and group.name == LEARNER:
        kit.handed_over = turns.chosen(config, turns.made(config.model, task.model_path), place)
    is_cut = post.group.is_cut
    if post.group.engine_ranks > 1:
        kit.loaded = share_of_model(task, device)
        check_window(config, kit.loaded)
        kit.tokenizer = kit.loaded.tokenizer
    elif post.group.has_engine or (not is_cut and (post.group.name == LEARNER or "reference" in post.stages)):
        kit.loaded = load(config.model, seed=config.seed, device=device, path=task.model_path)
        if post.group.name != LEARNER or is_cut:  # a whole learner sees to its own, which is this one
            routing.make_room(kit.loaded.model, config.learn.moe)
        check_window(config, kit.loaded)
        kit.tokenizer = kit.loaded.tokenizer
    else:
        kit.tokenizer = load_tokenizer(config.model, task.model_path)
    if post.group.name == LEARNER and not is_cut:
        _teach(kit)
    if post.group.has_engine:
        assert kit.loaded is not None
        if group.engine_ranks == 1:
            kit.engine = make_engine(kit.loaded, config)
        elif post.leads:
            kit.lead = LeadEngine(world)
            kit.engine = with_turns(kit.lead, kit.loaded, config)
        else:
            kit.follows = True
    if post.feeds:
        training, _ = open_source(config.data, config.seed)
        encode = PromptTokens(kit.tokenizer, config.data, config.rollout.max_new_tokens)
        kit.feed = FEEDS[algorithm.input_kind](training, config, encode, algorithm.greedy_rows)
        kit.open_feed()
    if "reward" in post.stages:
        kit.scorer = Scorer(config.rewards, device=config.device.partition(":")[0])
    if not is_cut:
        _staff(kit)
    return kit


def share_of_model(task: Assignment, device: torch.device) -> LoadedModel:
    """What one rank of an engine holds. Its weights come from the learner: none are read here."""
    model, post = task.config.model, task.post
    folder = task.model_path or (find.resolve(model.path) if model.path else None)
    if folder is None:
        loaded = load(model, seed=task.config.seed, device=torch.device("cpu"))
        parallel.cut(loaded.model, post.part, post.group.engine_ranks)
        loaded.model.to(device)
        return loaded
    module = empty_model(folder, model)
    parallel.cut(module, post.part, post.group.engine_ranks)
    materialise(module, device)
    if (folder / "generation_config.json").exists():
        module.generation_config = GenerationConfig.from_pretrained(folder)
    window = getattr(module.config.get_text_config(), "max_position_embeddings", 1 << 20)
    return wrap(module, load_tokenizer(model, folder), window)


def share_engine(kit: WorkerState, task: Assignment, where: StoreAddress) -> None:
    """Once the ranks are in one world: they make one engine of their shares, and follow its first rank."""
    config, post = kit.config, task.post
    assert kit.loaded is not None
    kind, ranks = backend(kit.device.type), post.group.engine_ranks
    if post.group.name == LEARNER:
        kit.engine_group = engine_groups(kind, post.group.ranks, ranks, config.cluster.collective_s)
    else:
        kit.engine_group = dist.group.WORLD
    notes = Notes(where, post.engine, ranks - 1, config.cluster.collective_s)
    engine = make_plain(kit.loaded, config, kit.engine_group)
    if kit.lead is not None:
        kit.lead.join(engine, notes)
    else:
        kit.follower = Follower(engine, notes, kit.loaded.model, kit.engine_group, kit.device)


def join_learners(kit: WorkerState, task: Assignment) -> None:
    """Once the ranks are one world: this rank's part of the learner, and the workers that need it; whole learners
    become copies of one another."""
    config, timeout_s = kit.config, kit.config.learn.parallel.timeout_s
    if not task.post.group.is_cut:
        sizes = config.learn.parallel.model_copy(
            update={"replicate": kit.world.size, "timeout_s": config.cluster.collective_s}
        )
        for learner in (kit.learner, kit.critic):
            if learner is not None:
                learner.join(mesh.build(sizes, kit.device.type))
        return
    if kit.algorithm.learns_values:
        raise ConfigError(
            f"algorithm {config.algorithm.name} learns no policy, which a learner cut over workers does",
            "set the sizes of learn.parallel to 1, or cluster.executor=local",
        )
    place, path = RankPlace(kit.device.type, kit.device), task.model_path
    kit.learner = cut_learner(config, updates_of(config), path, place)
    if "reference" in kit.stages:
        kit.reference = cut_reference(config, path, place)
    if kit.algorithm.has_critic:
        kit.critic = cut_critic(config, updates_of(config), path, place)
    shapes = {name: cut.shape for name, cut in kit.learner.cuts.items()}
    known = kit.world.gather(shapes, "counting the model's tensors")
    kit.parameters = elements({name: shape for part in known for name, shape in part.items()})
    roles = {"learn": kit.learner, "learn_values": kit.critic, "reference": kit.reference}
    kit.teams = {role: Team.of(model.meshes, timeout_s) for role, model in roles.items() if model is not None}
    _staff(kit)


def _staff(kit: WorkerState) -> None:
    kit.calls = Calls(kit.world) if kit.learner is not None else None
    makers = _makers(kit)
    for stage in kit.stages:
        kit.workers[stage] = makers[stage]()
    kit.keeper = ReferenceKeeper.of(kit.config, list(kit.workers.values()))
    if kit.loaded is not None and kit.handed_over != "never":
        away = None
        if kit.handed_over == "all":
            away = state_of(kit.loaded.model, kit.device, lambda: kit.workers.values())
        kit.turns = Handover(kit.engine, kit.tally, devices.pick(str(kit.device)), kit.handed_over, away)
        take_turns(kit.workers.values(), kit.turns)


def updates_of(config: Config) -> int:
    return config.train.steps * config.train.updates_per_step * config.train.passes_per_step


def _teach(kit: WorkerState) -> None:
    config, algorithm = kit.config, kit.algorithm
    assert kit.loaded is not None
    updates = updates_of(config)
    model = kit.loaded.model
    critic = None
    if needs_values(algorithm):
        shares_trunk = algorithm.has_critic and config.algorithm.critic.trunk == "shared"
        critic = ValueLearner(ValueModel(model, shares_trunk), config, algorithm, updates)
    kit.learner = critic if algorithm.learns_values and critic else Learner(model, config, algorithm, updates)
    kit.critic = critic if algorithm.has_critic else None  # a reward model is the learner itself
    kit.teams = {role: Team(kit.world.rank, kit.world.size) for role in ("learn", "learn_values")}
    kit.parameters = kit.loaded.parameters


def _makers(kit: WorkerState) -> dict[str, Callable[[], Worker]]:
    config, dock, tally = kit.config, kit.dock, kit.tally

    def learn(name: str, learner: Learner | None) -> Worker:
        assert learner is not None and kit.calls is not None
        critic = cast("RankLearnWorker | None", kit.workers.get("learn_values")) if name == "learn" else None
        return RankLearnWorker(dock, learner, config, tally, kit.world, kit.calls, kit.teams[name], name, critic)

    def scores(name: str, column: str, model: MeshModel | None, team: str) -> Worker:
        if not kit.is_cut or model is None:  # of a whole model, here or in a process of its own
            if model is None:
                assert kit.loaded is not None
                model = MeshModel(freeze(kit.loaded.model, config.algorithm.kl.weights), config, is_ready=True)
            return ScoreWorker(name, column, dock, model, config, tally)
        assert kit.learner is not None and kit.calls is not None
        follow = Follow(kit.learner, model, kit.world) if name == "reference" else None
        return CutScoreWorker(name, column, dock, model, config, tally, kit.world, kit.calls, kit.teams[team], follow)

    def reward() -> Worker:
        assert kit.scorer is not None
        texts = decoder(kit.tokenizer)
        return RewardWorker(dock, kit.scorer, texts, tally, kit.kept_samples.append, revealer(kit.tokenizer))

    def rollout() -> Worker:
        assert kit.engine is not None
        return RolloutWorker(dock, kit.engine, config, tally)

    def taught_by() -> MeshModel:
        return MeshModel(teacher(config, kit.device), config, is_ready=True)

    def refill(count: int) -> int:
        return kit.ahead.refill(count) if kit.ahead is not None else 0

    return {
        "rollout": rollout,
        "reward": reward,
        "old_logprobs": lambda: scores("old_logprobs", "old_logprobs", kit.learner, "learn"),
        "teacher": lambda: ScoreWorker("teacher", "teacher_logprobs", dock, taught_by(), config, tally),
        "reference": lambda: scores("reference", "ref_logprobs", kit.reference, "reference"),
        "advantage": lambda: AdvantageWorker(dock, kit.algorithm, config, tally, refill),
        "values": lambda: scores("values", "values", kit.critic, "learn_values"),
        "learn_values": lambda: learn("learn_values", kit.critic),
        "learn": lambda: learn("learn", kit.learner),
    }


class Puts:
    """The feeder's dock: remembers what was put of the steps under way, so that lost bytes can be put again."""

    def __init__(self, kit: WorkerState) -> None:
        self.kit = kit
        self.kept: dict[str, list[Batch]] = {}

    def put(self, rows: Batch, tag: str = "") -> None:
        self.kept.setdefault(tag, []).append(rows)
        self.kit.dock.put(rows, tag)

    def forget(self, tags: Collection[str]) -> None:
        """Of steps that are over."""
        self.kept = {tag: rows for tag, rows in self.kept.items() if tag in tags}

    def again(self) -> None:
        """What the dock still has is not entered twice."""
        for tag, listed in self.kept.items():
            for rows in listed:
                self.kit.dock.put(rows, tag)
