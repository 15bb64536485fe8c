"""Stage makers: how the worker of each stage is made from a worker's state. Every executor uses this table.

A stage of your own is one entry: its name in the algorithm's graph, and a function that makes its worker.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tidemill.cluster.worker.cut import CutLearnWorker, CutScoreWorker
from tidemill.cluster.worker.learners import RankLearnWorker
from tidemill.errors import ConfigError
from tidemill.flow.evaluate import decoder
from tidemill.flow.every_step import EveryStep
from tidemill.flow.learning import LearnWorker
from tidemill.flow.rewarding import RewardWorker
from tidemill.flow.rolling import RolloutWorker
from tidemill.flow.scoring import AdvantageWorker, ScoreWorker, ValueWorker
from tidemill.flow.stage import Worker
from tidemill.models.load import load
from tidemill.recipe.config import Config

if TYPE_CHECKING:
    from tidemill.cluster.worker.worker_state import WorkerState


def rollout(state: WorkerState) -> Worker:
    assert state.engine is not None
    state.rollout = RolloutWorker(state.dock, state.engine, state.config, state.tally)
    state.rollout.my_turn = state.rolling
    return state.rollout


def reward(state: WorkerState) -> Worker:
    assert state.scorer is not None
    return RewardWorker(state.dock, state.scorer, decoder(state.tokenizer), state.tally, state.kept_samples.append)


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
    column, config = "old_logprobs", state.config
    if (cut := state.cut) is not None:
        own = (config, state.tally, state.world, cut.calls, cut.team)
        return _in_learning_turn(state, CutScoreWorker(column, column, state.dock, cut.learner, *own))
    return _in_learning_turn(state, ScoreWorker(column, column, state.dock, state.policy, config, state.tally))


def reference(state: WorkerState) -> Worker:
    name, column, config = "reference", "ref_logprobs", state.config
    if (cut := state.cut) is not None:
        assert cut.reference is not None and cut.reference_team is not None
        own = (config, state.tally, state.world, cut.calls, cut.reference_team, cut.follow)
        return _in_learning_turn(state, CutScoreWorker(name, column, state.dock, cut.reference, *own))
    assert state.make_reference is not None
    model = _frozen(state, name, state.make_reference)
    return _in_learning_turn(state, ScoreWorker(name, column, state.dock, model, config, state.tally))


def teacher(state: WorkerState) -> Worker:
    model = _frozen(state, "teacher", lambda: load_teacher(state.config, state.device))
    made = ScoreWorker("teacher", "teacher_logprobs", state.dock, model, state.config, state.tally)
    return _in_learning_turn(state, made)


def values(state: WorkerState) -> Worker:
    if (cut := state.cut) is not None:
        assert cut.critic is not None and cut.critic_team is not None
        own = (state.config, state.tally, state.world, cut.calls, cut.critic_team)
        return _in_learning_turn(state, CutScoreWorker("values", "values", state.dock, cut.critic, *own))
    return _in_learning_turn(state, ValueWorker(state.dock, state.critic, state.config, state.tally))


def learn(state: WorkerState) -> Worker:
    state.learn = _learner(state, "learn")
    return state.learn


def learn_values(state: WorkerState) -> Worker:
    state.learn_values = _learner(state, "learn_values")
    return state.learn_values


def _learner(state: WorkerState, name: str) -> LearnWorker:
    """Learns with the policy's learner, or with the critic's; the policy's waits for the critic's."""
    is_policy = name == "learn"
    critic = state.learn_values if is_policy else None
    made: LearnWorker
    if (cut := state.cut) is not None:
        learner, team = (cut.learner, cut.team) if is_policy else (cut.critic, cut.critic_team)
        assert learner is not None and team is not None
        own = (state.world, cut.calls, team, name, critic)
        made = CutLearnWorker(state.dock, learner, state.config, state.tally, *own)
    elif state.is_alone:
        own_learner = state.learner if is_policy else state.critic
        made = LearnWorker(state.dock, own_learner, state.config, state.tally, name, critic)
    else:
        own_learner = state.learner if is_policy else state.critic
        made = RankLearnWorker(state.dock, own_learner, state.config, state.tally, state.world, name, critic)
    made.my_turn = state.learning
    return made


def _in_learning_turn(state: WorkerState, worker: Any) -> Worker:
    worker.my_turn = state.learning
    made: Worker = worker
    return made


def _frozen(state: WorkerState, name: str, make: Callable[[], Any]) -> Any:
    """A model that never learns is made once, however often its worker is."""
    if name not in state.frozen:
        state.frozen[name] = make()
    return state.frozen[name]


def load_teacher(config: Config, device: torch.device) -> Any:
    """The model that on-policy distillation learns from."""
    path = config.algorithm.teacher
    if path is None:
        raise ConfigError(
            f"algorithm {config.algorithm.name} needs a teacher", "set algorithm.teacher to a model folder"
        )
    return load(config.model.model_copy(update={"path": path}), seed=0, device=device).model.requires_grad_(False)


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
