"""Value heads: on a copy of the policy's decoder, or on the policy's own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.faults.test_resume import RECIPE, numbers
from tests.learn.test_engine import CPU, SHAPE, config, samples
from tidemill.algorithms.shared.registry import get
from tidemill.batch import Batch, Column
from tidemill.learn.values.critic import ValueLearner
from tidemill.learn.values.model import ValueModel
from tidemill.models.load import make_tiny
from tidemill.run import start as launch


def returns_to_learn() -> Batch:
    batch = samples()
    mask = batch["mask"]
    returns = np.concatenate([np.full(n, float(i % 3)) for i, n in enumerate(mask.lengths)]).astype(np.float32)
    zeros = np.zeros_like(returns)
    return batch.merge({"returns": Column(returns, mask.offsets), "values": Column(zeros, mask.offsets)})


@pytest.mark.parametrize("shares_trunk", [False, True])
def test_a_value_head_starts_at_zero_and_comes_nearer_to_the_returns(shares_trunk: bool) -> None:
    policy, batch = make_tiny(SHAPE, torch.float32, 0, CPU).model, returns_to_learn()
    before = {n: p.detach().clone() for n, p in policy.named_parameters()}
    over: dict[str, Any] = {"name": "ppo", "critic": {"lr": 1e-2, "value_clip": None}}
    learner = ValueLearner(ValueModel(policy, shares_trunk), config(algorithm=over), get("ppo"), 40)
    assert not learner.values(batch).values.any()
    errors = []
    for _ in range(40):
        learner.accumulate(batch)
        learner.update()
        errors.append(float(np.square(learner.values(batch).values - batch.values("returns")).mean()))
    assert errors[-1] < 0.8 * errors[0]
    for name, p in policy.named_parameters():
        assert torch.equal(p, before[name]) and p.grad is None, name


def test_a_value_head_is_learned_whole_beside_adapters() -> None:
    policy, batch = make_tiny(SHAPE, torch.float32, 0, CPU).model, returns_to_learn()
    own = config(algorithm={"name": "ppo", "critic": {"lr": 1e-2}}, learn={"lora_rank": 2})
    learner = ValueLearner(ValueModel(policy), own, get("ppo"), 4)
    for _ in range(2):
        learner.accumulate(batch)
        learner.update()
    assert learner.values(batch).values.any()


def test_a_shared_trunk_keeps_no_second_model() -> None:
    policy = make_tiny(SHAPE, torch.float32, 0, CPU).model
    learner = ValueLearner(ValueModel(policy, True), config(algorithm="ppo", learn={"lora_rank": 2}), get("ppo"), 1)
    assert {n for n, _ in learner.model.named_parameters()} == {"head.weight", "head.bias"}
    assert sum(t.numel() for t in learner.state()[0].values()) == 33


def test_ppo_runs_with_a_shared_trunk(tmp_path: Path) -> None:
    critic = {"trunk": "shared", "lr": 1e-2}
    over = {"folder": str(tmp_path), "algorithm": {"name": "ppo", "critic": critic}}
    launch.train({**RECIPE, **over, "train": {**RECIPE["train"], "steps": 2, "updates_per_step": 1}})
    learned = [line for line in numbers(tmp_path / "small") if "critic/loss" in line]
    assert len(learned) == 2 and learned[1]["critic/grad_norm"] > 0
