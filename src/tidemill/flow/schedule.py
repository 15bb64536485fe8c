"""Schedules: everything that `sync`, `streamed` and `async` decide. A schedule changes a step's speed, never its
numbers."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.recipe.config import Config


@dataclass(frozen=True, slots=True)
class Schedule:
    in_turn: bool  # one stage after the other, each on the whole step; else every stage works on what is ready
    lead: int  # steps that rollout may run ahead of learning
    carries: bool = False  # a step takes the groups that finish first, and leaves the others to the next

    @property
    def serves_on(self) -> bool:
        """Say whether rollout works while weights arrive: they are then written aside, and taken up between tokens."""
        return self.lead > 0


def schedule_of(config: Config) -> Schedule:
    flow = config.flow
    lead = flow.max_staleness if flow.schedule == "async" else 0
    return Schedule(in_turn=flow.schedule == "sync", lead=lead, carries=flow.carry_over > 0)


def may_lag(config: Config) -> bool:
    """Say whether samples may be of older weights, so that their age is counted (0 where the bound is 0)."""
    return config.flow.schedule == "async" or config.flow.carry_over > 0


def has_fixed_places(config: Config) -> bool:
    """Say whether a step's groups follow each other, so that a group's number tells which update it belongs to."""
    return not (config.algorithm.dynamic_sampling or config.flow.carry_over)


def is_rollout_apart(config: Config) -> bool:
    """Say whether rollout has weights of its own: in one process by flow.placement, elsewhere by cluster.placement."""
    if config.cluster.executor == "local":
        return config.flow.is_separated
    return config.cluster.placement.rollout == "separated"


def staleness_limit(config: Config) -> int | None:
    """Return the bound in updates of the weights, which the dock counts. None: nothing can be stale."""
    train = config.train
    return schedule_of(config).lead * train.updates_per_step * train.passes_per_step or None
