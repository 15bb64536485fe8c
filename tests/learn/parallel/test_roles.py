"""The reference, a critic and a reward model across ranks, on the actor's mesh or on their own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.learn.parallel.products import make_model, recipe, samples
from tidemill.algorithms.shared.registry import get
from tidemill.batch import Batch, Column
from tidemill.cluster.start.ranks import Ranks
from tidemill.learn.engine import score
from tidemill.learn.values.critic import ValueLearner
from tidemill.learn.values.model import ValueModel

pytestmark = pytest.mark.slow


def with_values(batch: Batch) -> Batch:
    rng = np.random.default_rng(0)
    lengths = batch["tokens"].lengths - batch.values("prompt_length")
    made = {n: Column.jagged([rng.normal(size=k) for k in lengths], np.float32) for n in ("values", "returns")}
    return batch.merge(made)


def criticise(parallel: dict[str, Any]) -> Any:
    """A critic on a mesh of its own, beside an actor on another, and the critic of one rank."""
    from tidemill.learn.engine import Learner
    from tidemill.learn.parallel import mesh
    from tidemill.learn.values.critic import ValueLearner

    settings = {"algorithm": {"name": "ppo"}}
    model = make_model("dense")
    alone = ValueLearner(ValueModel(model), recipe({}, settings), get("ppo"), 4)
    config = recipe(parallel, settings)
    critic = ValueLearner(ValueModel(model), config, get("ppo"), 4, mesh.build(config.learn.parallel))
    own = recipe({"fsdp": dist.get_world_size()}, settings)
    actor = Learner(copy.deepcopy(model), own, get("ppo"), 4, mesh.build(own.learn.parallel))
    found = []
    for i in range(2):
        batch = with_values(samples(i))
        actor.accumulate(batch)
        actor.update()
        for learner in (alone, critic):
            learner.accumulate(batch)
            found.append(learner.update())
    values = [learner.values(samples(7)).values for learner in (alone, critic)]
    critic.close()
    actor.close()
    return found, values


@pytest.mark.parametrize("parallel", [{"fsdp": 4}, {"tp": 2, "fsdp": 2}, {"cp": 2, "fsdp": 2}])
def test_a_critic_on_its_own_mesh_learns_as_on_one_rank(parallel: dict[str, Any], ranks: Ranks) -> None:
    metrics, (alone, found) = ranks.call(criticise, parallel, on=4)[0]
    for one, many in zip(metrics[::2], metrics[1::2]):
        for name in one:
            # A token at the edge of the clip may fall on either side by rounding.
            close = 0.02 if name.endswith("_share") else 1e-5
            assert many[name] == pytest.approx(one[name], abs=close, rel=1e-4), name
    assert np.abs(alone).max() > 1e-4  # it has learned something
    np.testing.assert_allclose(found, alone, atol=1e-5)


def criticise_from_folder(folder: Path, save_to: Path) -> Any:
    """An actor and a critic of one folder, whose pieces are read where they belong; saved together."""
    from tidemill.learn.build import critic, learner

    own = {"model": {"path": str(folder)}, "algorithm": {"name": "ppo", "critic": {"parallel": {"tp": 2}}}}
    config = recipe({"fsdp": 2}, own)
    actor, values = learner(config, 4), critic(config, 4)
    found = []
    for i in range(2):
        values.accumulate(with_values(samples(i)))
        found.append(values.update())
    actor.save(save_to, 1, {}, keep=1, critic=values)
    before = values.values(samples(7)).values
    actor.saver.wait()
    again = critic(config, 4)
    actor.load(save_to / "step-000001", again)
    after = again.values(samples(7)).values
    for one in (again, values, actor):
        one.close()
    return found, before, after, again.version


def test_a_critic_of_a_folder_is_saved_with_its_actor_and_comes_back(ranks: Ranks, tmp_path: Path) -> None:
    model = make_model("dense")
    model.save_pretrained(tmp_path / "model")
    found, before, after, version = ranks.call(criticise_from_folder, tmp_path / "model", tmp_path / "saved", on=2)[0]
    alone = ValueLearner(ValueModel(model), recipe({}, {"algorithm": {"name": "ppo"}}), get("ppo"), 4)
    for i, metrics in enumerate(found):
        alone.accumulate(with_values(samples(i)))
        assert alone.update()["loss"] == pytest.approx(metrics["loss"], abs=1e-6)
    np.testing.assert_allclose(before, alone.values(samples(7)).values, atol=1e-5)
    np.testing.assert_array_equal(after, before)
    assert version == 2


def refer(parallel: dict[str, Any]) -> Any:
    from tidemill.learn.build import learner, reference

    config = recipe({"fsdp": 4}, {"algorithm": {"name": "grpo", "kl": {"coef": 0.1, "parallel": parallel}}})
    actor, frozen = learner(config, 2), reference(config)
    first = frozen.logprobs(samples(3)).values
    actor.accumulate(samples(1))
    actor.update()
    return first, frozen.logprobs(samples(3)).values, frozen.meshes.parallel.tp


def test_the_reference_stays_as_it_was_on_sizes_of_its_own(ranks: Ranks) -> None:
    from tidemill.models.load import make_tiny
    from tidemill.recipe.config import TinyModel

    config = recipe({}, {})
    before, after, tp = ranks.call(refer, {"tp": 2, "fsdp": 2}, on=4)[0]
    assert tp == 2
    np.testing.assert_array_equal(before, after)
    import torch

    model = make_tiny(TinyModel(), torch.float32, 0, torch.device("cpu")).model
    np.testing.assert_allclose(before, score(model, samples(3), config).values, atol=1e-5)
