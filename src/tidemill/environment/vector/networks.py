"""What a recipe with a network policy needs from its environment, checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tidemill.algorithms.shared import registry
from tidemill.environment.vector.making import spaces_of
from tidemill.errors import ConfigError, TidemillError
from tidemill.models.spaces import Spaces
from tidemill.recipe.config import Config

# Settings of decoders: section, name.
OF_DECODERS = (
    ("learn", "lora_rank"), ("learn", "backend"), ("learn", "fp8"), ("learn", "master"), ("learn", "moments"),
    ("learn", "recompute"), ("learn", "offload"), ("learn", "optimizer_on_host"), ("learn", "optimizer"),
    ("rollout", "engine"), ("rollout", "tp"), ("rollout", "batch_invariant"), ("rollout", "stop"),
    ("flow", "carry_over"), ("model", "path"), ("model", "tiny"), ("model", "warm_start"), ("model", "dtype"),
    ("train", "updates_per_step"), ("train", "passes_per_step"), ("algorithm", "dynamic_sampling"),
)  # fmt: skip
INSTEAD = {
    "updates_per_step": "learn.minibatch cuts a step's decisions",
    "passes_per_step": "learn.epochs says how often they are learned from",
}


def fitted(config: Config) -> Config:
    """With what the recipe leaves to its environment and its algorithm: spaces, and what the critic judges."""
    policy = config.model.policy
    assert policy is not None
    changes: dict[str, Any] = {}
    if policy.spaces is None and config.environment is not None and config.environment.program is None:
        changes["spaces"] = spaces_of(config.environment).plain()
    if policy.judges is None:
        try:
            changes["judges"] = registry.of(config).judges
        except TidemillError:
            return config  # said by the checks
    own = policy.model_copy(update=changes)
    usual = 1 if policy.kind == "mlp" else None  # several threads cost more than they save in small products
    threads = config.threads or usual
    return config.model_copy(update={"model": config.model.model_copy(update={"policy": own}), "threads": threads})


def problems(config: Config) -> Iterator[str]:
    policy, usual = config.model.policy, Config()
    assert policy is not None
    if config.environment is None or config.environment.program is not None:
        yield "model.policy is set, but there is no environment for it to act in; set environment.name"
        return
    for section, name in OF_DECODERS:
        value = getattr(getattr(config, section), name)
        if value != getattr(getattr(usual, section), name):
            instead = f"; {INSTEAD[name]}" if name in INSTEAD else "; leave it out"
            yield f"{section}.{name} is {value}, which is for decoders{instead}"
    if config.learn.parallel.ranks > 1:
        yield (
            f"learn.parallel comes to {config.learn.parallel.ranks} ranks, but a network is whole on every rank; "
            "cluster.learners with cluster.executor=processes makes several learners"
        )
    try:
        spaces = Spaces.of(policy.spaces) if policy.spaces else spaces_of(config.environment)
    except ConfigError as error:
        yield f"{error.message}; {error.remedy}" if error.remedy else error.message
        return
    if policy.kind == "cnn" and not spaces.pixels:
        yield f"model.policy.kind is cnn, but observations are numbers, {list(spaces.observation)}; mlp would do"
    if policy.kind != "cnn" and spaces.pixels:
        yield f"model.policy.kind is {policy.kind}, but observations are images, {list(spaces.observation)}: use cnn"
    if policy.head == "squashed_gaussian" and not spaces.low:
        yield "model.policy.head is squashed_gaussian, but actions have no bounds to squash into; gaussian would do"
    if policy.head not in ("auto", "categorical") and spaces.choices:
        yield f"model.policy.head is {policy.head}, but actions are choices; categorical would do"
    if policy.head == "categorical" and not spaces.choices:
        yield "model.policy.head is categorical, but actions are real numbers; gaussian would do"
