"""Placement: whether a cluster has room for a run's workers, and what would fit. Pure functions on data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tidemill import device
from tidemill.cluster.wiring import LEARNER, REWARD, REWARD_MODEL, ROLLOUT, Post, Resources, Wiring, needs_text
from tidemill.errors import ConfigError
from tidemill.recipe.config import Cluster, Config


class PlacementError(ConfigError):
    """The cluster does not have what the placement asks for."""


def accelerator_of(config: Config, nodes: Sequence[Resources]) -> str | None:
    """Return the resource that a worker with a model requests: the recipe's device, or what the cluster has."""
    kind = config.device.partition(":")[0]
    if kind == "auto":
        have = [r for r in device.RESOURCES.values() if any(node.get(r, 0) > 0 for node in nodes)]
        return have[0] if have else None
    return device.RESOURCES.get(kind)


# Fitting


def check(wiring: Wiring, nodes: Sequence[Resources], wanted: Cluster) -> None:
    """Refuse a placement that the cluster cannot hold; say what is missing and what would fit."""
    missing = shortage(wiring, nodes)
    if not missing:
        return
    have = "; ".join(f"node {i}: {needs_text(tuple(node.items()))}" for i, node in enumerate(nodes)) or "no nodes"
    lack = ", ".join(f"{needs_text(post.group.needs)} for {post.name}" for post in missing[:4])
    more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
    raise PlacementError(
        f"the placement does not fit: {wiring.describe()}, but the cluster has {have}; no room is left of {lack}{more}",
        _advice(wiring, nodes, wanted),
    )


def shortage(wiring: Wiring, nodes: Sequence[Resources]) -> list[Post]:
    """Return processes for which no node has room, placing the largest needs first."""
    room = [dict(node) for node in nodes]
    missing = []
    for post in sorted(wiring.posts, key=lambda p: -sum(v for k, v in p.group.needs if k != "CPU")):
        for node in room:
            if all(node.get(name, 0.0) >= amount - 1e-9 for name, amount in post.group.needs):
                for name, amount in post.group.needs:
                    node[name] = node.get(name, 0.0) - amount
                break
        else:
            missing.append(post)
    return missing


def _advice(wiring: Wiring, nodes: Sequence[Resources], wanted: Cluster) -> str:
    for smaller, words in _smaller(wiring, wanted):
        if not shortage(smaller, nodes):
            return f"this would fit: {words}; or add nodes"
    sizes = ["a size of learn.parallel"] if wiring.learners.is_cut else []
    sizes += ["rollout.tp, dp or pp"] if any(g.engine_ranks > 1 for g in wiring.groups) else []
    return f"lower {' or '.join(['cluster.cpus', *sizes])}, or add nodes"


def _smaller(wiring: Wiring, wanted: Cluster) -> Iterator[tuple[Wiring, str]]:
    """List placements that need less, those that give up least first."""
    is_cut = wiring.learners.is_cut  # all ranks are needed then
    own = wiring.group(ROLLOUT)
    tp = own.engine_ranks if own is not None else 1
    sizes = {
        "learners": (wiring.learners.ranks,) if is_cut else range(wanted.learners, 0, -1),
        "rollouts": range(wanted.rollouts, 0, -1),
        "rewards": range(wanted.rewards, 0, -1),
        "reward_models": range(wanted.reward_models, 0, -1),
    }
    for chosen in itertools.product(*sizes.values()):
        asked = dict(zip(sizes, chosen, strict=True))
        counts = {LEARNER: asked["learners"], ROLLOUT: asked["rollouts"] * tp, REWARD_MODEL: asked["reward_models"]}
        if "reward" in getattr(wiring.group(REWARD), "stages", ()):
            counts[REWARD] = asked["rewards"]
        groups = tuple(replace(g, ranks=counts.get(g.name, g.ranks)) for g in wiring.groups)
        keys = {k: v for k, v in asked.items() if not (is_cut and k == "learners")}
        yield Wiring(groups), " ".join(f"cluster.{k}={v}" for k, v in keys.items() if v != getattr(wanted, k))
    if is_cut or tp > 1:
        return
    one = replace(wiring.learners, ranks=1)
    yield Wiring((one,)), "cluster.learners=1 cluster.placement=colocated"
