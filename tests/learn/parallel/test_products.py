"""Every product of sizes gives one rank's loss, gradients and next weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.learn.parallel.products import Case, make_model, product, recipe, samples
from tidemill.algorithms.shared.registry import get
from tidemill.cluster.start.ranks import Ranks
from tidemill.learn.engine import Learner

CLOSE = 1e-5  # float32

PRODUCTS = [
    Case("dense", {"fsdp": 2}),
    Case("untied", {"fsdp": 2}),
    Case("dense", {"fsdp": 4}),
    Case("dense", {"fsdp": 8}),
    Case("experts", {"fsdp": 2}),
    Case("experts", {"fsdp": 4}),
    Case("dense", {"replicate": 2}),
    Case("dense", {"replicate": 2, "fsdp": 2}),
    Case("untied", {"replicate": 2, "fsdp": 4}),
    Case("dense", {"tp": 2}),
    Case("untied", {"tp": 2}),
    Case("dense", {"tp": 4}),
    Case("biased", {"tp": 4}),  # fewer key heads than ranks, with biases
    Case("few_keys", {"tp": 4}),
    Case("one_key", {"tp": 8}),
    Case("experts", {"tp": 2}),
    Case("experts", {"tp": 4}),
    Case("latent", {"tp": 2}),
    Case("dense", {"fsdp": 2, "tp": 2}),
    Case("few_keys", {"fsdp": 2, "tp": 4}),
    Case("experts", {"fsdp": 2, "tp": 2}),
    Case("latent", {"fsdp": 2, "tp": 2}),
    Case("one_key", {"replicate": 2, "tp": 2}),
    Case("untied", {"replicate": 2, "fsdp": 2, "tp": 2}),
    Case("dense", {"fsdp": 2, "tp": 2}, {"name": ["recompute"], "learn": {"recompute": "full"}}),
    Case("dense", {"fsdp": 2}, {"name": ["master"], "learn": {"master": "float32"}}),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_a_product_of_sizes_gives_the_numbers_of_one_rank(case: Case, ranks: Ranks) -> None:
    found = ranks.call(product, case, on=case.ranks)[0]
    far = {name: value for name, value in found.items() if isinstance(value, float) and value > CLOSE}
    assert not far, found


def learn_own_shares(parallel: dict[str, Any]) -> dict[str, float]:
    """Each data-parallel rank has groups of its own, one of them none at all."""
    from tidemill.learn.engine import Learner
    from tidemill.learn.parallel import mesh

    config = recipe(parallel, {})
    learner = Learner(make_model("dense"), config, get("grpo"), 2, mesh.build(config.learn.parallel))
    batch = samples(1)
    groups = batch.values("group")
    mine = np.flatnonzero((groups % (learner.meshes.dp_size - 1)) == learner.meshes.dp_rank)
    learner.accumulate_own(batch.gather(mine) if len(mine) else None)
    metrics = learner.update()
    learner.close()
    return metrics


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"fsdp": 4}, {"replicate": 2, "fsdp": 2, "tp": 2}], ids=str)
def test_ranks_that_bring_their_own_samples_make_the_update_of_all(parallel: dict[str, Any], ranks: Ranks) -> None:
    alone = Learner(make_model("dense"), recipe({}, {}), get("grpo"), 2)
    alone.accumulate(samples(1))
    wanted = alone.update()
    for found in ranks.call(learn_own_shares, parallel, on=Case("dense", parallel).ranks):
        for name, value in wanted.items():
            assert found[name] == pytest.approx(value, abs=1e-5, rel=1e-5), name


def learn_in(dtype: str) -> float:
    from tidemill.learn.engine import Learner
    from tidemill.learn.parallel import mesh

    config = recipe({"fsdp": 2}, {"learn": {"reduce_dtype": dtype}})
    learner = Learner(make_model("dense"), config, get("grpo"), 2, mesh.build(config.learn.parallel))
    learner.accumulate(samples(1))
    norm = learner.update()["grad_norm"]
    learner.close()
    return norm


@pytest.mark.slow
def test_gradients_may_be_added_up_in_sixteen_bits(ranks: Ranks) -> None:
    exact, narrow = (ranks.call(learn_in, dtype, on=2)[0] for dtype in ("float32", "bfloat16"))
    assert narrow != exact  # it was rounded
    assert narrow == pytest.approx(exact, rel=1e-2)


def learn_from_nothing(parallel: dict[str, Any]) -> dict[str, float]:
    from tidemill.learn.engine import Learner
    from tidemill.learn.parallel import mesh

    config = recipe(parallel, {})
    learner = Learner(make_model("dense"), config, get("grpo"), 2, mesh.build(config.learn.parallel))
    batch, found = samples(1), {}
    poison = batch.merge({"advantages": np.full(batch.rows, np.nan, np.float32)})
    learner.accumulate(poison)
    found["skipped"] = learner.update()["skipped_updates"]
    learner.accumulate(batch.merge({"advantages": np.zeros(batch.rows, np.float32)}))
    found["norm_without_advantage"] = learner.update()["grad_norm"]
    learner.close()
    return found


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_skips_the_update_on_every_rank(ranks: Ranks) -> None:
    found = ranks.call(learn_from_nothing, {"fsdp": 2, "tp": 2}, on=4)
    assert [one["skipped"] for one in found] == [1.0] * 4
