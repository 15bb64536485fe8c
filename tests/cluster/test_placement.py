"""Which process does what, and whether a cluster has room for it."""

from __future__ import annotations

import pytest

from tidemill.algorithms.shared.registry import get
from tidemill.cluster.driver.placement import PlacementError, accelerator_of, check, shortage
from tidemill.cluster.wiring import wire
from tidemill.recipe.config import Config


def placed(accelerator: str | None = None, algorithm: dict[str, object] | None = None, **cluster: object):
    config = Config(algorithm=algorithm or {"name": "grpo"}, cluster={"executor": "processes", **cluster})
    return config, wire(config, get(config.algorithm.name).graph(config), accelerator)


def test_separated_roles_have_processes_of_their_own() -> None:
    _, made = placed(learners=2, rollouts=3, rewards=2)
    assert {g.name: (g.ranks, g.stages) for g in made.groups} == {
        "learner": (2, ("learn",)),
        "rollout": (3, ("rollout",)),
        "reward": (2, ("reward", "advantage")),
    }
    assert [p.name for p in made.posts if p.feeds] == ["reward-0"]
    assert [p.stages for p in made.group("reward").posts] == [("reward", "advantage"), ("reward",)]


def test_colocated_roles_share_the_learners() -> None:
    _, made = placed(learners=2, placement="colocated")
    assert [g.name for g in made.groups] == ["learner"] and made.is_colocated
    assert made.posts[0].feeds and "advantage" not in made.posts[1].stages


def test_placement_is_chosen_role_by_role() -> None:
    kl = {"name": "grpo", "kl": {"coef": 0.1}}
    _, made = placed(algorithm=kl, placement={"rollout": "colocated", "reference": "separated"})
    assert {g.name for g in made.groups} == {"learner", "reward", "reference"}


@pytest.mark.parametrize("resource", ["GPU", "NPU"])
def test_what_has_a_model_needs_a_device_and_what_has_none_does_not(resource: str) -> None:
    config, made = placed(accelerator=resource)
    assert {g.name: dict(g.needs).get(resource, 0) for g in made.groups} == {"learner": 1, "rollout": 1, "reward": 0}
    assert accelerator_of(config, [{"CPU": 8, resource: 4}]) == resource
    assert accelerator_of(config, [{"CPU": 8, "GPU": 0.0}]) is None


LEARNED = {"functions": [{"function": "exact"}, {"function": "model", "args": {"path": "judge"}}]}


def learned(accelerator: str | None = "GPU", **cluster: object):
    config = Config(rewards=LEARNED, cluster={"executor": "processes", **cluster})
    return config, wire(config, get("grpo").graph(config), accelerator)


def test_a_trained_reward_model_is_a_role_with_devices_of_its_own() -> None:
    _, made = learned(rewards=3, reward_models=2)
    assert {g.name: (g.ranks, g.stages, dict(g.needs).get("GPU", 0)) for g in made.groups} == {
        "learner": (1, ("learn",), 1),
        "rollout": (1, ("rollout",), 1),
        "reward": (1, ("advantage",), 0),  # feeds and works out advantages, in one place and without a device
        "reward_model": (2, ("reward",), 1),
    }
    assert [p.name for p in made.posts if p.feeds] == ["reward-0"]


def test_a_trained_reward_model_may_share_the_learners_devices() -> None:
    _, made = learned(placement={"reward_model": "colocated"})
    assert {g.name: g.stages for g in made.groups} == {
        "learner": ("reward", "learn"), "rollout": ("rollout",), "reward": ("advantage",)
    }  # fmt: skip
    _, made = learned(placement="colocated")
    assert [g.name for g in made.groups] == ["learner"]


def test_a_reward_model_for_which_there_is_no_device_is_refused_with_what_would_fit() -> None:
    config, made = learned(reward_models=2)
    with pytest.raises(PlacementError) as raised:
        check(made, [{"CPU": 16.0, "GPU": 3.0}], config.cluster)
    assert "2 × reward_model (1 CPU + 1 GPU)" in raised.value.message
    assert "this would fit: cluster.reward_models=1" in raised.value.remedy


def test_a_placement_that_does_not_fit_says_what_is_missing_and_what_would_fit() -> None:
    config, made = placed(accelerator="GPU", learners=2, rollouts=4)
    nodes = [{"CPU": 16.0, "GPU": 2.0}, {"CPU": 16.0, "GPU": 2.0}]
    assert len(shortage(made, nodes)) == 2
    with pytest.raises(PlacementError) as raised:
        check(made, nodes, config.cluster)
    assert "node 1: 16 CPU + 2 GPU" in raised.value.message and "rollout" in raised.value.message
    assert "this would fit: cluster.rollouts=2" in raised.value.remedy
    check(made, [*nodes, {"CPU": 4.0, "GPU": 2.0}], config.cluster)


def test_where_nothing_separated_fits_colocated_is_advised() -> None:
    config, made = placed(accelerator="NPU")
    with pytest.raises(PlacementError) as raised:
        check(made, [{"CPU": 4.0, "NPU": 1.0}], config.cluster)
    assert "cluster.placement=colocated" in raised.value.remedy


def test_an_engine_of_several_ranks_takes_a_device_for_each_and_one_place_for_requests() -> None:
    config = Config(cluster={"executor": "processes", "rollouts": 2}, rollout={"tp": 2})
    made = wire(config, get("grpo").graph(config), "GPU")
    group = made.group("rollout")
    assert group is not None and group.ranks == 4
    assert [(p.name, p.engine, p.leads, p.stages) for p in group.posts] == [
        ("rollout-0", 0, True, ("rollout",)), ("rollout-1", 0, False, ()),
        ("rollout-2", 1, True, ("rollout",)), ("rollout-3", 1, False, ()),
    ]  # fmt: skip
    with pytest.raises(PlacementError) as raised:
        check(made, [{"CPU": 16.0, "GPU": 4.0}], config.cluster)
    assert "2 engines of 2 ranks" in raised.value.message
    assert "this would fit: cluster.rollouts=1" in raised.value.remedy
    with pytest.raises(PlacementError) as raised:
        check(made, [{"CPU": 16.0, "GPU": 2.0}], config.cluster)
    assert "rollout.tp" in raised.value.remedy
