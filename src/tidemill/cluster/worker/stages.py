"""Makes the worker of each stage from a worker's state. Every executor uses this table. A stage of your own is one
entry: its name in the algorithm's graph, and a function that makes its worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tidemill.cluster.worker.cut import CutScoreWorker
from tidemill.cluster.worker.learners import RankLearnWorker
from tidemill.cluster.worker.weights import Follow
from tidemill.errors import ConfigError
from tidemill.flow.evaluate import decoder, revealer
from tidemill.flow.stages.every_step import EveryStep
from tidemill.flow.stages.learning import LearnWorker
from tidemill.flow.stages.rewarding import RewardWorker
from tidemill.flow.stages.rolling import RolloutWorker
from tidemill.flow.stages.scoring import AdvantageWorker, ScoreWorker
from tidemill.flow.stages.stage import Worker
from tidemill.learn.model import MeshModel
from tidemill.models.load import load
from tidemill.recipe.config import Config

if TYPE_CHECKING:
    from tidemill.cluster.worker.worker_state import WorkerState


def rollout(state: WorkerState) -> Worker:
    assert state.engine is not None
    own = state.engine if state.config.model.policy is not None else None
    state.rollout = RolloutWorker(state.dock, state.engine, state.config, state.tally, own)
    state.rollout.my_turn = state.rolling
    return state.rollout


def reward(state: WorkerState) -> Worker:
    assert state.scorer is not None
    decode, show, keep = decoder(state.tokenizer), revealer(state.tokenizer), state.kept_samples.append
    return RewardWorker(state.dock, state.scorer, decode, state.tally, keep, show)


def advantage(state: WorkerState) -> Worker:
    config, algorithm, ahead = state.config, state.algorithm, state.ahead

    def refill(count: int, tag: str | None = None) -> int:
        return state.ahead.refill(count, tag) if state.ahead is not None else 0

    def one(tag: str | None = None) -> AdvantageWorker:
        made = AdvantageWorker(state.dock, algorithm, config, state.tally, partial(refill, tag=tag))
        made.begin(0, tag)
        return made

    looks_ahead = config.algorithm.dynamic_sampling and config.algorithm.kl.target is None
    if ahead is not None and ahead.lead and looks_ahead and not algorithm.wants_whole_step(config):
        return EveryStep("advantage", [one(tag) for tag in ahead.tags])
    state.advantage = one()
    return state.advantage


def old_logprobs(state: WorkerState) -> Worker:
    return _scores(state, "old_logprobs", "old_logprobs", state.learner, "learn")


def values(state: WorkerState) -> Worker:
    return _scores(state, "values", "values", state.critic, "learn_values")


def reference(state: WorkerState) -> Worker:
    if state.reference is not None:
        follow = Follow(state.learner, state.reference, state.world)
        return _scores(state, "reference", "ref_logprobs", state.reference, "reference", follow)
    assert state.make_reference is not None
    return _scores(state, "reference", "ref_logprobs", _frozen(state, "reference", state.make_reference))


def teacher(state: WorkerState) -> Worker:
    model = _frozen(state, "teacher", lambda: load_teacher(state.config, state.device))
    return _scores(state, "teacher", "teacher_logprobs", model)


def _scores(
    state: WorkerState, name: str, column: str, model: Any, team: str = "", follow: Callable[[], None] | None = None
) -> Worker:
    """Make a scoring worker, for a whole model in this process or for a team's part of one."""
    if team and not state.is_cut and not state.is_alone:  # a replica, which need not wait for the others to score
        model = MeshModel(model.model, state.config, is_ready=True)
    own = (name, column, state.dock, model, state.config, state.tally)
    made = ScoreWorker(*own)
    if team and state.is_cut:
        assert state.calls is not None
        made = CutScoreWorker(*own, state.world, state.calls, state.teams[team], follow)
    made.my_turn = state.learning
    return made


def learn(state: WorkerState) -> Worker:
    state.learn = _learner(state, "learn", state.learner, state.learn_values)
    return state.learn


def learn_values(state: WorkerState) -> Worker:
    state.learn_values = _learner(state, "learn_values", state.critic)
    return state.learn_values


def _learner(state: WorkerState, name: str, learner: Any, critic: Any = None) -> LearnWorker:
    """Make the policy's learning worker, or the critic's, for which the policy's waits."""
    made: LearnWorker
    if state.is_alone:
        made = LearnWorker(state.dock, learner, state.config, state.tally, name, critic)
    else:
        assert state.calls is not None
        ranks = (state.world, state.calls, state.teams[name], name, critic)
        made = RankLearnWorker(state.dock, learner, state.config, state.tally, *ranks)
    made.my_turn = state.learning
    return made


def _frozen(state: WorkerState, name: str, make: Callable[[], Any]) -> Any:
    """Return a frozen model, which is made once however often its worker is."""
    if name not in state.frozen:
        state.frozen[name] = make()
    return state.frozen[name]


def load_teacher(config: Config, device: torch.device) -> MeshModel:
    """Make the model that on-policy distillation learns from."""
    path = config.algorithm.teacher
    if path is None:
        raise ConfigError(
            f"algorithm {config.algorithm.name} needs a teacher", "set algorithm.teacher to a model folder"
        )
    loaded = load(config.model.model_copy(update={"path": path}), seed=0, device=device)
    return MeshModel(loaded.model.requires_grad_(False), config, is_ready=True)


STAGES: dict[str, Callable[[WorkerState], Worker]] = {
    "rollout": rollout,
    "reward": reward,
    "advantage": advantage,
    "old_logprobs": old_logprobs,
    "reference": reference,
    "teacher": teacher,
    "values": values,
    "learn_values": learn_values,
    "learn": learn,
}
