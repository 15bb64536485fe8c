"""Builds a worker for a post: loads what its stages need, and makes their workers. The same for every executor."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from transformers import GenerationConfig

from tidemill import device as devices
from tidemill.algorithms.shared.registry import get as get_algorithm
from tidemill.cluster.assignment import Assignment
from tidemill.cluster.report import StoreAddress
from tidemill.cluster.start.ranked import RankedLearner
from tidemill.cluster.worker.cut import Team
from tidemill.cluster.worker.engine_ranks import Follower, LeadEngine, Notes, engine_groups
from tidemill.cluster.worker.kept_tally import tally_of
from tidemill.cluster.worker.learners import World
from tidemill.cluster.worker.worker_state import WorkerState
from tidemill.data.survey import open_rows
from tidemill.device import determinism
from tidemill.device.collective import backend
from tidemill.dock import Dock
from tidemill.environment.vector.feed import FragmentFeed
from tidemill.errors import ConfigError
from tidemill.estimate import handover as turns
from tidemill.flow.feed import FEEDS, encoder_of
from tidemill.learn import build as parts
from tidemill.learn.checkpoint.model_folder import empty_model, materialise
from tidemill.learn.engine import Learner, freeze
from tidemill.learn.mindspore.learner import MindSporeLearner
from tidemill.learn.model import MeshModel
from tidemill.learn.network import NetworkLearner
from tidemill.learn.parallel import mesh
from tidemill.learn.parallel.cuts import elements
from tidemill.learn.values.critic import ValueLearner
from tidemill.learn.values.model import ValueModel
from tidemill.models.box import find
from tidemill.models.load import LoadedModel, load, load_tokenizer, wrap
from tidemill.models.mixture import routing
from tidemill.recipe.config import Config
from tidemill.reward.score import Scorer
from tidemill.rollout.make import make_plain
from tidemill.rollout.native.ranks import share
from tidemill.rollout.native.ranks.grid import Grid
from tidemill.rollout.native.ranks.links import Links
from tidemill.rollout.native.ranks.replicas import Replicas
from tidemill.rollout.vllm.adapter import say_merged
from tidemill.serve.make import conversing, make_engine


def build_worker(task: Assignment, dock: Dock) -> WorkerState:
    config, post, group = task.config, task.post, task.post.group
    torch.set_num_threads(task.threads)
    if config.deterministic:
        determinism.demand()
    place = devices.pick(task.device)
    world = World(post.rank, group.ranks) if group.learns else World(post.part, group.engine_ranks)
    state = WorkerState(
        post.stages,
        config,
        get_algorithm(config.algorithm.name),
        dock,
        tally_of(task, task.dock),
        world,
        place.torch_device,
        is_alone=not task.dies_alone,
    )
    if group.has_engine and group.learns:
        state.handed_over = turns.chosen(config, turns.made(config.model, task.model_path), place)
    _load(state, task)
    if group.learns and not group.is_cut:
        _teach(state, task)
    if group.has_engine:
        _make_engine(state, task)
    if post.feeds:
        state.feed = _feed(state)
        state.open_feed()
    if "reward" in post.stages:
        state.scorer = Scorer(config.rewards, state.moved_on, task.device)
    if not group.is_cut:  # else once its ranks have joined
        _staff(state)
    return state


def _feed(state: WorkerState) -> Any:
    config, algorithm = state.config, state.algorithm
    if config.model.policy is not None:
        return FragmentFeed(config)
    training, _ = open_rows(config)
    encode = encoder_of(config, state.tokenizer, config.rollout.max_new_tokens)
    return FEEDS[algorithm.input_kind](training, config, encode, algorithm.greedy_rows)


def _load(state: WorkerState, task: Assignment) -> None:
    """Load the model that is trained, served or compared with here; only a tokenizer where there is none."""
    config, post, group = task.config, task.post, task.post.group
    if group.engine_ranks > 1:
        state.loaded = share_of_model(task, state.device)
    elif group.has_engine or (not group.is_cut and (group.learns or "reference" in post.stages)):
        state.loaded = load(config.model, seed=config.seed, device=state.device, path=task.model_path)
        if not group.learns or group.is_cut:  # a whole learner frees its own, which is this model
            routing.make_room(state.loaded.model, config.learn.moe)
    if state.loaded is None:
        state.tokenizer = load_tokenizer(config.model, task.model_path)
        return
    check_window(config, state.loaded)
    state.tokenizer, state.parameters = state.loaded.tokenizer, state.loaded.parameters
    state.make_reference = partial(_freeze, state.loaded.model, config)


def check_window(config: Config, loaded: LoadedModel) -> None:
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if longest > loaded.window:
        raise ConfigError(
            f"data.max_prompt_tokens ({config.data.max_prompt_tokens}) + rollout.max_new_tokens "
            f"({config.rollout.max_new_tokens}) = {longest}, but the model's window is {loaded.window} tokens",
            f"lower one of them by {longest - loaded.window}",
        )


def _freeze(model: Any, config: Config) -> MeshModel:
    return MeshModel(freeze(model, config.algorithm.kl.weights), config, is_ready=True)


def updates_of(config: Config) -> int:
    return config.train.steps * config.train.updates_per_step * config.train.passes_per_step


def _teach(state: WorkerState, task: Assignment) -> None:
    """Make a learner of a whole model; or, in one process, of a model that is cut over ranks which it starts itself."""
    config, algorithm, updates = state.config, state.algorithm, updates_of(state.config)
    assert state.loaded is not None
    model = state.loaded.model
    if config.learn.parallel.ranks > 1:
        _teach_ranks(state, task, updates)
        return
    critic = None
    if config.model.policy is not None:
        state.learner = NetworkLearner(model, config, algorithm, updates)
    elif algorithm.has_critic or algorithm.learns_values:
        shares_trunk = algorithm.has_critic and config.algorithm.critic.trunk == "shared"
        critic = ValueLearner(ValueModel(model, shares_trunk), config, algorithm, updates)
    if config.learn.backend == "mindspore":
        state.learner = MindSporeLearner(model, config, algorithm, updates, task.logs / "mindspore.log")
    elif state.learner is None:
        state.learner = critic if algorithm.learns_values and critic else Learner(model, config, algorithm, updates)
    state.critic = critic if algorithm.has_critic else None  # the learner itself is the reward model
    state.teams = {role: Team(state.world.rank, state.world.size) for role in ("learn", "learn_values")}
    if task.hooks.dump is not None:
        state.learner.show = task.hooks.dump.tensors


def _teach_ranks(state: WorkerState, task: Assignment, updates: int) -> None:
    assert state.loaded is not None
    learner = RankedLearner(state.loaded.model, state.config, updates, task.model_path)
    state.learner = state.away = learner
    try:
        state.critic = learner.critic(updates) if state.algorithm.has_critic else None
    except BaseException:
        learner.close()
        raise
    kl = state.config.algorithm.kl
    if not kl.reset_every and kl.weights == "same":  # one that moves, or is quantised, is made in this process
        state.make_reference = partial(learner.reference, task.model_path)


def _make_engine(state: WorkerState, task: Assignment) -> None:
    assert state.loaded is not None
    if task.post.group.engine_ranks == 1:
        if state.away is not None and state.config.learn.lora_rank and state.config.rollout.engine == "vllm":
            say_merged("the ranks that learn.parallel cuts the learner into publish so with cluster.executor=local")
        is_copy = task.post.group.is_cut or not task.post.group.learns
        state.engine = make_engine(state.loaded, state.config, task.logs.parent, task.post.name, is_copy)
    elif task.post.leads:
        state.lead = LeadEngine(state.world)
        state.engine = conversing(state.lead, state.loaded, state.config, task.logs.parent, task.post.name)
    else:
        state.follows = True


def _staff(state: WorkerState) -> None:
    state.make_workers()
    state.take_turns()


# Ranks


def share_of_model(task: Assignment, device: torch.device) -> LoadedModel:
    """Make one rank's part of an engine. Its weights come from the learner: none are read here."""
    model, post = task.config.model, task.post
    folder = task.model_path or (find.resolve(model.path) if model.path else None)
    if folder is None:
        loaded = load(model, seed=task.config.seed, device=torch.device("cpu"))
        routing.make_room(loaded.model, task.config.learn.moe)
        share.cut(loaded.model, Grid.of(task.config.rollout), post.part, task.config.rollout.experts.spare)
        loaded.model.to(device)
        return loaded
    module = empty_model(folder, model)
    routing.make_room(module, task.config.learn.moe)
    share.cut(module, Grid.of(task.config.rollout), post.part, task.config.rollout.experts.spare)
    materialise(module, device)
    if (folder / "generation_config.json").exists():
        module.generation_config = GenerationConfig.from_pretrained(folder)
    window = getattr(module.config.get_text_config(), "max_position_embeddings", 1 << 20)
    return wrap(module, load_tokenizer(model, folder), window)


def share_engine(state: WorkerState, task: Assignment, where: StoreAddress) -> None:
    """Join the ranks' parts into one engine, once the ranks are in one world; the others follow its first rank."""
    config, post, wait_s = state.config, task.post, task.config.cluster.collective_s
    assert state.loaded is not None
    kind, ranks = backend(state.device.type), post.group.engine_ranks
    learns = post.group.learns
    state.engine_group = engine_groups(kind, post.group.ranks, ranks, wait_s) if learns else dist.group.WORLD
    links = Links(Grid.of(config.rollout), state.engine_group, wait_s)
    notes = Notes(where, post.engine, ranks - 1, wait_s)
    engine = state.engine_part = cast(Replicas, make_plain(state.loaded, config, links))
    if state.lead is not None:
        state.lead.join(engine, notes)
    else:
        state.follower = Follower(engine, notes, state.loaded.model, state.engine_group, state.device)


def join_learners(state: WorkerState, task: Assignment) -> None:
    """Make this rank's part of the learner, and the workers that need it, once the ranks are one world; whole
    learners become replicas."""
    config, timeout_s = state.config, state.config.learn.parallel.timeout_s
    if not task.post.group.is_cut:
        sizes = config.learn.parallel.model_copy(
            update={"replicate": state.world.size, "timeout_s": config.cluster.collective_s}
        )
        for learner in (state.learner, state.critic):
            if learner is not None:
                learner.join(mesh.build(sizes, state.device.type))
        return
    if state.algorithm.learns_values:
        raise ConfigError(
            f"algorithm {config.algorithm.name} trains no policy, and only a policy can be cut over workers",
            "set the sizes of learn.parallel to 1, or cluster.executor=local",
        )
    place, path = parts.RankPlace(state.device.type, state.device), task.model_path
    state.is_cut, state.learner = True, parts.learner(config, updates_of(config), path, place)
    if "reference" in state.stages:
        state.reference = parts.reference(config, path, place)
    if state.algorithm.has_critic:
        state.critic = parts.critic(config, updates_of(config), path, place)
    shapes = {name: cut.shape for name, cut in state.learner.cuts.items()}
    known = state.world.gather(shapes, "counting the model's tensors")
    state.parameters = elements({name: shape for part in known for name, shape in part.items()})
    roles = {"learn": state.learner, "learn_values": state.critic, "reference": state.reference}
    state.teams = {role: Team.of(model.meshes, timeout_s) for role, model in roles.items() if model is not None}
    _staff(state)
