"""What saves memory on one rank saves it on several: adapters, Muon and moments in eight bits give one rank's steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.learn.parallel.products import Case, make_model, product, recipe, samples
from tests.learn.parallel.test_checkpoint import learner_of
from tests.learn.parallel.test_products import CLOSE
from tidemill.algorithms.shared.registry import get
from tidemill.cluster.start.ranks import Ranks
from tidemill.learn import checkpoint as plain
from tidemill.learn.engine import Learner

pytestmark = pytest.mark.slow

LORA: dict[str, Any] = {"name": ["lora"], "learn": {"lora_rank": 3, "lora_alpha": 6.0, "lr": 1e-2}}
DORA: dict[str, Any] = {"name": ["dora"], "learn": {**LORA["learn"], "dora": True}}
MUON: dict[str, Any] = {"name": ["muon"], "learn": {"optimizer": "muon"}}
BOTH: dict[str, Any] = {"name": ["lora", "muon"], "learn": {"lora_rank": 4, "optimizer": "muon"}}
FP8: dict[str, Any] = {"name": ["fp8"], "learn": {"fp8": "rowwise"}}
INT8: dict[str, Any] = {"name": ["int8"], "learn": {"moments": "int8"}}


@pytest.mark.parametrize(
    "case",
    [
        Case("dense", {"fsdp": 2}, LORA),
        Case("dense", {"fsdp": 2}, DORA),
        Case("biased", {"tp": 4}, LORA),  # key heads that two ranks share
        Case("few_keys", {"fsdp": 2, "tp": 2}, LORA),
        Case("deep", {"pp": 2, "cp": 2}, LORA),
        Case("experts", {"fsdp": 2, "ep": 2}, LORA),
        Case("experts", {"fsdp": 2, "ep": 2, "tp": 2}, LORA),
        Case("mixtral", {"tp": 2, "fsdp": 2}, LORA),
        Case("mixtral", {"fsdp": 3}, LORA),  # experts are cut by their rows
        Case("untied", {"fsdp": 2}, MUON),
        Case("few_keys", {"tp": 4}, MUON),
        Case("dense", {"replicate": 2, "fsdp": 2}, MUON),
        Case("experts", {"pp": 2, "fsdp": 2}, MUON),
        Case("dense", {"fsdp": 2, "tp": 2}, BOTH),
    ],
    ids=str,
)
def test_adapters_and_muon_over_ranks_give_the_numbers_of_one_rank(case: Case, ranks: Ranks) -> None:
    found = ranks.call(product, case, on=case.ranks)[0]
    far = {name: value for name, value in found.items() if isinstance(value, float) and value > CLOSE}
    assert not far, found


@pytest.mark.parametrize("case", [Case("dense", {"fsdp": 2}, FP8), Case("untied", {"replicate": 2}, FP8)], ids=str)
def test_products_in_eight_bits_over_ranks_stay_near_one_ranks(case: Case, ranks: Ranks) -> None:
    """Scales are of a micro-batch's own values, and ranks cut micro-batches otherwise: near, not the same."""
    found = ranks.call(product, case, on=case.ranks)[0]
    assert found["grad_norm"] < 0.05 and found["loss"] < 0.01 and found["logprobs"] < 0.1, found
    whole = Case(case.model, case.parallel, {})
    assert ranks.call(product, whole, on=case.ranks)[0]["grad_norm"] < found["grad_norm"]  # it was rounded


# Of two steps of 1e-3. Under fsdp only vectors, shorter than a block, have other neighbours; under tp matrices too.
@pytest.mark.parametrize(("parallel", "close"), [({"fsdp": 2}, 2e-5), ({"fsdp": 2, "tp": 2}, 5e-5)], ids=str)
def test_moments_in_eight_bits_over_ranks_stay_near_one_ranks(
    parallel: dict[str, Any], close: float, ranks: Ranks
) -> None:
    case = Case("dense", parallel, INT8)
    found = ranks.call(product, case, on=case.ranks)[0]
    far = {n: v for n, v in found.items() if isinstance(v, float) and v > (close if n == "weights" else CLOSE)}
    assert not far, found


def learn_and_average(parallel: dict[str, Any]) -> Any:
    learner = learner_of("dense", parallel, ema=0.7)
    learner.accumulate(samples(1))
    learner.update()
    before = learner.logprobs(samples(3)).values
    with learner.averaged():
        inside = learner.logprobs(samples(3)).values
    after = learner.logprobs(samples(3)).values
    learner.close()
    return before, inside, after


def test_a_running_mean_in_pieces_is_one_ranks(ranks: Ranks) -> None:
    before, inside, after = ranks.call(learn_and_average, {"fsdp": 2, "tp": 2}, on=4)[0]
    alone = Learner(make_model("dense"), recipe({}, {"learn": {"ema": 0.7}}), get("grpo"), 9)
    alone.accumulate(samples(1))
    alone.update()
    with alone.averaged():
        np.testing.assert_allclose(inside, alone.logprobs(samples(3)).values, atol=1e-5)
    assert np.abs(inside - before).max() > 1e-4
    np.testing.assert_array_equal(before, after)


def go_on(learner: Any) -> float:
    """What the update after next comes to: it feels the optimizer's state, not the weights alone."""
    for seed in (2, 3):
        learner.accumulate(samples(seed))
        loss = learner.update()["loss"]
    return float(loss)


def learn_and_save(parallel: dict[str, Any], folder: Path, learn: dict[str, Any]) -> float:
    learner = learner_of("dense", parallel, **learn)
    learner.accumulate(samples(1))
    learner.update()
    learner.save(folder, 1, {}, keep=1)
    loss = go_on(learner)
    learner.close()
    return loss


def load_and_learn(parallel: dict[str, Any], path: Path, learn: dict[str, Any]) -> float:
    learner = learner_of("dense", parallel, **learn)
    learner.load(path)
    loss = go_on(learner)
    learner.close()
    return loss


@pytest.mark.parametrize("settings", [LORA, DORA, MUON, INT8], ids=lambda s: s["name"][0])
def test_such_a_run_goes_on_from_its_checkpoint_on_other_ranks_and_on_one(
    settings: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    learn = settings["learn"]
    wanted = ranks.call(learn_and_save, {"fsdp": 2}, tmp_path / "many", learn, on=2)[0]
    other = {"replicate": 2} if learn.get("dora") else {"tp": 2}
    for parallel, close in (({"fsdp": 2}, 1e-7), (other, 2e-6)):
        found = ranks.call(load_and_learn, parallel, tmp_path / "many/step-000001", learn, on=2)[0]
        assert found == pytest.approx(wanted, abs=close), parallel
    tensors, state = plain.load(tmp_path / "many/step-000001")
    alone = Learner(make_model("dense"), recipe({}, {"learn": learn}), get("grpo"), 9)
    alone.restore(tensors, state["learner"])
    assert go_on(alone) == pytest.approx(wanted, abs=2e-6)

    # And the other way: what one rank saved is taken up by two.
    alone = Learner(make_model("dense"), recipe({}, {"learn": learn}), get("grpo"), 9)
    alone.accumulate(samples(1))
    alone.update()
    tensors, counts = alone.state()
    plain.save(tmp_path / "one", 1, tensors, {"learner": counts}, keep=1)
    found = ranks.call(load_and_learn, {"fsdp": 2}, tmp_path / "one/step-000001", learn, on=2)[0]
    assert found == pytest.approx(wanted, abs=2e-6)


def learn_from_folder(folder: Path, parallel: dict[str, int], learn: dict[str, Any]) -> list[float]:
    from tidemill.learn.build import learner

    made = learner(recipe(parallel, {"model": {"path": str(folder)}, "learn": learn}), 3)
    losses = []
    for seed in (1, 2):
        made.accumulate(samples(seed))
        losses.append(made.update()["loss"])
    made.close()
    return losses


@pytest.mark.parametrize(("parallel", "settings"), [({"fsdp": 2, "tp": 2}, LORA), ({"fsdp": 4}, DORA)], ids=str)
def test_adapters_on_a_streamed_folder_begin_as_on_one_rank(
    parallel: dict[str, int], settings: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    model = make_model("untied")
    model.save_pretrained(tmp_path)
    found = ranks.call(learn_from_folder, tmp_path, parallel, settings["learn"], on=4)[0]
    alone = Learner(model, recipe({}, {"learn": settings["learn"]}), get("grpo"), 3)
    for seed, loss in zip((1, 2), found, strict=True):
        alone.accumulate(samples(seed))
        assert alone.update()["loss"] == pytest.approx(loss, abs=1e-6)
