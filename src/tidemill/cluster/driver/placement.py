"""Placement: which process does which stages, what each needs, and whether a cluster has it. Pure functions on data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tidemill import device
from tidemill.errors import ConfigError
from tidemill.graph import Graph
from tidemill.recipe.config import Cluster, Config

LEARNER, ROLLOUT, REWARD, REFERENCE = "learner", "rollout", "reward", "reference"
REWARD_MODEL = "reward_model"
ONE_PLACE = ("advantage",)  # a whole step may be judged at once: only the first process of its group does it
Resources = Mapping[str, float]  # as Ray counts them: CPU, GPU, NPU, …


class PlacementError(ConfigError):
    """The cluster does not have what the placement asks for."""


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Processes that do the same. Those that learn share a torch.distributed world."""

    name: str
    ranks: int
    stages: tuple[str, ...]
    needs: tuple[tuple[str, float], ...]  # resources of each process
    is_feeder: bool = False  # its first process feeds prompts
    has_engine: bool = False  # rolls out and evaluates
    is_cut: bool = False  # each holds a part of the model
    engine_ranks: int = 1  # neighbours that share one engine

    @property
    def posts(self) -> tuple[Post, ...]:
        return tuple(Post(self, rank) for rank in range(self.ranks))


@dataclass(frozen=True, slots=True)
class Post:
    """One process."""

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
    def feeds(self) -> bool:
        return self.group.is_feeder and self.rank == 0


@dataclass(frozen=True, slots=True)
class Placement:
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
    def is_colocated(self) -> bool:
        """Whether rollout is in the learners' processes."""
        return self.learners.has_engine

    @property
    def shares_tensors(self) -> bool:
        """Whether rollout reads the learner's own tensors, so that nothing moves."""
        return self.is_colocated and not self.learners.is_cut

    def describe(self) -> str:
        return ", ".join(f"{g.ranks} × {g.name}{_shared(g)} ({needs_text(g.needs)})" for g in self.groups)


def _shared(group: WorkerGroup) -> str:
    engines = group.ranks // group.engine_ranks
    return f" ({engines} engines of rollout.tp {group.engine_ranks})" if group.engine_ranks > 1 else ""


def place(config: Config, graph: Graph, accelerator: str | None = None) -> Placement:
    """Stages to groups. `accelerator`: the resource that whoever has a model needs one of, None for the CPU."""
    wanted = config.cluster
    places = wanted.placement
    home = {
        "rollout": LEARNER if places.rollout == "colocated" else ROLLOUT,
        "reward": LEARNER if places.reward == "colocated" else REWARD,
        "reference": LEARNER if places.reference == "colocated" else REFERENCE,
    }
    stages: dict[str, list[str]] = {LEARNER: []}
    for role in (*home.values(), REWARD_MODEL):
        stages.setdefault(role, [])
    for stage in graph.stages:
        own_home = home.get(stage.role, LEARNER)
        if stage.name == "reward" and config.rewards.models:  # where the model is; feed and advantages need no device
            own_home = LEARNER if places.reward_model == "colocated" else REWARD_MODEL
        stages[own_home].append(stage.name)
    parts = config.learn.parallel.ranks
    tp = config.rollout.tp
    ranks = {
        LEARNER: max(wanted.learners, parts),
        ROLLOUT: wanted.rollouts * tp,
        REWARD: wanted.rewards if "reward" in stages.get(REWARD, ()) else 1,  # feed and advantages have one place
        REFERENCE: 1,
        REWARD_MODEL: wanted.reward_models,
    }
    groups = []
    for name, own in stages.items():
        if name in (REFERENCE, REWARD_MODEL) and not own:
            continue  # nothing to compare with, or to judge by
        on_device = name != REWARD and accelerator is not None
        needs = {"CPU": wanted.cpus} | ({str(accelerator): 1.0} if on_device else {})
        groups.append(
            WorkerGroup(
                name, ranks[name], tuple(own), tuple(needs.items()),
                is_feeder=home["reward"] == name, has_engine=home["rollout"] == name,
                is_cut=name == LEARNER and parts > 1, engine_ranks=tp if home["rollout"] == name else 1,
            )
        )  # fmt: skip
    return Placement(tuple(groups))


def accelerator_of(config: Config, nodes: Sequence[Resources]) -> str | None:
    """The resource that a worker with a model asks for: of the device the recipe names, or of what the cluster has."""
    kind = config.device.partition(":")[0]
    if kind == "auto":
        have = [r for r in device.RESOURCES.values() if any(node.get(r, 0) > 0 for node in nodes)]
        return have[0] if have else None
    return device.RESOURCES.get(kind)


# Fitting


def check(placement: Placement, nodes: Sequence[Resources], wanted: Cluster) -> None:
    """Refuse a placement that the cluster cannot hold: what is missing, and what would fit."""
    missing = shortage(placement, nodes)
    if not missing:
        return
    have = "; ".join(f"node {i}: {needs_text(tuple(node.items()))}" for i, node in enumerate(nodes)) or "no nodes"
    lack = ", ".join(f"{needs_text(post.group.needs)} for {post.name}" for post in missing[:4])
    more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
    raise PlacementError(
        f"the placement does not fit: {placement.describe()}, but the cluster has {have}; "
        f"no room is left of {lack}{more}",
        _advice(placement, nodes, wanted),
    )


def shortage(placement: Placement, nodes: Sequence[Resources]) -> list[Post]:
    """Processes for which no node has room, largest needs placed first."""
    room = [dict(node) for node in nodes]
    missing = []
    for post in sorted(placement.posts, key=lambda p: -sum(v for k, v in p.group.needs if k != "CPU")):
        for node in room:
            if all(node.get(name, 0.0) >= amount - 1e-9 for name, amount in post.group.needs):
                for name, amount in post.group.needs:
                    node[name] = node.get(name, 0.0) - amount
                break
        else:
            missing.append(post)
    return missing


def _advice(placement: Placement, nodes: Sequence[Resources], wanted: Cluster) -> str:
    for smaller, words in _smaller(placement, wanted):
        if not shortage(smaller, nodes):
            return f"this would fit: {words}; or add nodes"
    sizes = ["a size of learn.parallel"] if placement.learners.is_cut else []
    sizes += ["rollout.tp"] if any(g.engine_ranks > 1 for g in placement.groups) else []
    return f"lower {' or '.join(['cluster.cpus', *sizes])}, or add nodes"


def _smaller(placement: Placement, wanted: Cluster) -> Iterator[tuple[Placement, str]]:
    """Placements that ask for less, those that give up least first."""
    is_cut = placement.learners.is_cut  # then all parts are needed
    own = placement.group(ROLLOUT)
    tp = own.engine_ranks if own is not None else 1
    sizes = {
        "learners": (placement.learners.ranks,) if is_cut else range(wanted.learners, 0, -1),
        "rollouts": range(wanted.rollouts, 0, -1),
        "rewards": range(wanted.rewards, 0, -1),
        "reward_models": range(wanted.reward_models, 0, -1),
    }
    for chosen in itertools.product(*sizes.values()):
        asked = dict(zip(sizes, chosen, strict=True))
        counts = {LEARNER: asked["learners"], ROLLOUT: asked["rollouts"] * tp, REWARD_MODEL: asked["reward_models"]}
        if "reward" in getattr(placement.group(REWARD), "stages", ()):
            counts[REWARD] = asked["rewards"]
        groups = tuple(replace(g, ranks=counts.get(g.name, g.ranks)) for g in placement.groups)
        keys = {k: v for k, v in asked.items() if not (is_cut and k == "learners")}
        yield Placement(groups), " ".join(f"cluster.{k}={v}" for k, v in keys.items() if v != getattr(wanted, k))
    if is_cut or tp > 1:
        return
    one = replace(placement.learners, ranks=1)
    yield Placement((one,)), "cluster.learners=1 cluster.placement=colocated"


def needs_text(needs: Sequence[tuple[str, float]]) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in needs if amount) or "nothing"
