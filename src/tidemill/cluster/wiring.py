"""The wiring of a run: a table of roles, and from it which worker does which stages, on what, and what its loss costs.

Plain data, the same for every executor: the local one holds all posts in this process, the others give each post a
process. A role of your own is one entry in `ROLES`, and one stage in `cluster.worker.stages.STAGES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from tidemill.flow.schedule import is_rollout_apart
from tidemill.graph import Graph, Stage
from tidemill.recipe.config import Config

LEARNER, ROLLOUT, REWARD, REFERENCE = "learner", "rollout", "reward", "reference"
REWARD_MODEL = "reward_model"
ONE_PLACE = ("advantage",)  # a whole step may be judged at once: only the first worker of its group does it
Resources = Mapping[str, float]  # as Ray counts them: CPU, GPU, NPU, …

# What follows from the loss of a worker. alone: it starts again, others take its leases; engine: so do the ranks that
# share an engine with it; world: all ranks of its group start again, from the newest checkpoint.
Restart = Literal["alone", "engine", "world"]


@dataclass(frozen=True, slots=True)
class Role:
    """One row of the table. Its stages are the learner's where `is_apart` says no, and always in one process."""

    name: str  # its workers are NAME-0, NAME-1, …
    takes: Callable[[Stage, Config], bool]
    is_apart: Callable[[Config], bool] = lambda config: True
    workers: Callable[[Config, tuple[str, ...]], int] = lambda config, stages: 1  # how many, of those stages
    has_device: bool = True
    restart: Restart = "alone"
    is_needed: bool = False  # also where the algorithm has no stage for it: it feeds, or evaluates


def _of_role(name: str) -> Callable[[Stage, Config], bool]:
    return lambda stage, config: stage.role == name


def _judges(stage: Stage, config: Config) -> bool:
    return stage.name == "reward" and bool(config.rewards.models)


# In the order in which they are asked whether a stage is theirs; what nobody takes is the learner's.
ROLES: dict[str, Role] = {
    role.name: role
    for role in (
        Role(
            LEARNER,
            takes=lambda stage, config: False,
            workers=lambda config, stages: max(config.cluster.learners, config.learn.parallel.ranks),
            restart="world",
            is_needed=True,
        ),
        Role(
            ROLLOUT,
            takes=_of_role("rollout"),
            is_apart=is_rollout_apart,
            workers=lambda config, stages: config.cluster.rollouts * config.rollout.ranks,
            restart="engine",
            is_needed=True,
        ),
        Role(
            REWARD_MODEL,
            takes=_judges,
            is_apart=lambda config: config.cluster.placement.reward_model == "separated",
            workers=lambda config, stages: config.cluster.reward_models,
        ),
        Role(
            REWARD,
            takes=_of_role("reward"),
            is_apart=lambda config: config.cluster.placement.reward == "separated",
            workers=lambda config, stages: config.cluster.rewards if "reward" in stages else 1,
            has_device=False,
            is_needed=True,
        ),
        Role(
            REFERENCE,
            takes=_of_role("reference"),
            is_apart=lambda config: config.cluster.placement.reference == "separated",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Workers that do the same. Those that learn share a torch.distributed world."""

    name: str
    ranks: int
    stages: tuple[str, ...]
    needs: tuple[tuple[str, float], ...]  # resources of each
    is_feeder: bool = False  # its first worker feeds prompts
    has_engine: bool = False  # rolls out and evaluates
    is_cut: bool = False  # each holds a part of the model
    engine_ranks: int = 1  # neighbours that share one engine
    restart: Restart = "alone"

    @property
    def posts(self) -> tuple[Post, ...]:
        return tuple(Post(self, rank) for rank in range(self.ranks))

    @property
    def learns(self) -> bool:
        return self.name == LEARNER


@dataclass(frozen=True, slots=True)
class Post:
    """The place of one worker."""

    group: WorkerGroup
    rank: int

    @property
    def name(self) -> str:
        return f"{self.group.name}-{self.rank}"

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(s for s in self.group.stages if self._does(s))

    def _does(self, stage: str) -> bool:
        if stage == ROLLOUT:
            return self.leads
        return self.rank == 0 or stage not in ONE_PLACE

    @property
    def engine(self) -> int:
        """Which of the group's engines it is a part of."""
        return self.rank // self.group.engine_ranks

    @property
    def part(self) -> int:
        """Which rank of its engine."""
        return self.rank % self.group.engine_ranks

    @property
    def leads(self) -> bool:
        """Whether its engine's requests come here."""
        return self.part == 0

    @property
    def acts(self) -> bool:
        """Whether it has something to do of its own."""
        return self.leads or self.group.learns

    @property
    def feeds(self) -> bool:
        return self.group.is_feeder and self.rank == 0


@dataclass(frozen=True, slots=True)
class Wiring:
    groups: tuple[WorkerGroup, ...]

    @property
    def posts(self) -> tuple[Post, ...]:
        return tuple(post for group in self.groups for post in group.posts)

    def group(self, name: str) -> WorkerGroup | None:
        return next((g for g in self.groups if g.name == name), None)

    @property
    def learners(self) -> WorkerGroup:
        found = self.group(LEARNER)
        assert found is not None
        return found

    @property
    def engines(self) -> WorkerGroup:
        """Whose workers roll out and evaluate."""
        return next(g for g in self.groups if g.has_engine)

    @property
    def is_colocated(self) -> bool:
        """Whether rollout is in the learners' processes."""
        return self.learners.has_engine

    @property
    def shares_tensors(self) -> bool:
        """Whether rollout reads the learner's own tensors, so that nothing moves."""
        return self.is_colocated and not self.learners.is_cut

    def describe(self) -> str:
        return ", ".join(f"{g.ranks} × {g.name}{_shared(g)} ({needs_text(g.needs)})" for g in self.groups)


def wire(config: Config, graph: Graph, accelerator: str | None = None) -> Wiring:
    """Stages to groups. `accelerator`: the resource that a worker with a model needs one of, None for the CPU."""
    home = {name: name if _has_workers(role, config) else LEARNER for name, role in ROLES.items()}
    stages: dict[str, list[str]] = {home[name]: [] for name in ROLES}
    for stage in graph.stages:
        taker = next((name for name, role in ROLES.items() if role.takes(stage, config)), LEARNER)
        stages[home[taker]].append(stage.name)
    groups = []
    for name, own in stages.items():
        role, has_processes = ROLES[name], config.cluster.executor != "local"
        if not own and not role.is_needed:
            continue  # nothing to compare with, or to judge by
        on_device = role.has_device and accelerator is not None
        rolls_out = home[ROLLOUT] == name
        groups.append(
            WorkerGroup(
                name,
                role.workers(config, tuple(own)) if has_processes else 1,
                tuple(own),
                (("CPU", config.cluster.cpus), *(((str(accelerator), 1.0),) if on_device else ())),
                is_feeder=home[REWARD] == name,
                has_engine=rolls_out,
                is_cut=has_processes and name == LEARNER and config.learn.parallel.ranks > 1,
                engine_ranks=config.rollout.ranks if rolls_out and has_processes else 1,
                restart=role.restart,
            )
        )
    return Wiring(tuple(groups))


def _has_workers(role: Role, config: Config) -> bool:
    """Whether it has workers of its own. In one process rollout alone may, and has a thread then."""
    if config.cluster.executor == "local" and role.name not in (LEARNER, ROLLOUT):
        return False
    return role.is_apart(config)


def _shared(group: WorkerGroup) -> str:
    engines = group.ranks // group.engine_ranks
    return f" ({engines} engines of {group.engine_ranks} ranks)" if group.engine_ranks > 1 else ""


def needs_text(needs: tuple[tuple[str, float], ...]) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in needs if amount) or "nothing"
