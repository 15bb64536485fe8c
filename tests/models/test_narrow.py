import numpy as np
import pytest
import torch
from tests.learn.parallel import models
from tests.learn.test_engine import CPU, SHAPE, config, samples

from tidemill.algorithms.shared.registry import get
from tidemill.check import rules
from tidemill.learn.engine import Learner, freeze, score
from tidemill.models.layers.eight import DTYPES, encode
from tidemill.models.layers.narrow import NarrowLinear
from tidemill.models.load import make_tiny
from tidemill.recipe.config import Config


@pytest.mark.parametrize(("weights", "most"), [("int8", 1 / 254), ("fp8", 1 / 16)])
def test_a_rounded_weight_is_within_half_a_step_of_the_weight(weights, most):
    torch.manual_seed(0)
    weight = torch.randn(24, 40) * torch.logspace(-4, 2, 24)[:, None]
    code, scale = encode(weight, DTYPES[weights])
    gap = (code.float() * scale[:, None] - weight).abs()
    bound = weight.abs().amax(1, keepdim=True) if weights == "int8" else weight.abs()
    assert (gap <= most * bound + 1e-3 * most * weight.abs().amax(1, keepdim=True)).all()
    assert code.element_size() == 1


@pytest.mark.parametrize(("weights", "most"), [("int8", 0.01), ("fp8", 0.05)])
def test_a_reference_with_8_bit_weights_is_near_the_policy_it_was_made_of_and_stays(weights, most):
    model, batch = make_tiny(SHAPE, torch.float32, 0, CPU).model, samples()
    plain = score(model, batch, config()).values
    reference = freeze(model, weights)
    assert sum(isinstance(m, NarrowLinear) for m in reference.modules()) == 14
    near = score(reference, batch, config()).values
    assert 0 < abs(near - plain).mean() < most
    learner = Learner(model, config(learn={"lr": 1e-2}), get("grpo"), 1)
    learner.accumulate(batch)
    learner.update()
    assert (score(reference, batch, config()).values == near).all()


def test_the_policy_may_have_been_made_ready_for_learning_before():
    """Its layers then run in fused forms, where the processor has them."""
    model, batch = make_tiny(SHAPE, torch.float32, 0, CPU).model, samples()
    wanted = score(freeze(model, "int8"), batch, config()).values
    Learner(model, config(), get("grpo"), 1)
    np.testing.assert_allclose(score(freeze(model, "int8"), batch, config()).values, wanted, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
@pytest.mark.parametrize(("weights", "most"), [("int8", 0.05), ("fp8", 0.3)])
def test_stacked_experts_are_narrow_too_and_nearly_all_of_a_mixtures_bytes_go(name, weights, most):
    model, batch = models.model(name, moe_intermediate_size=64, num_hidden_layers=2), models.samples()
    plain = score(model, batch, models.config()).values
    stacks = {n for n, p in model.named_parameters() if p.ndim == 3}
    before = sum(p.numel() for n, p in model.named_parameters() if "layers" in n)
    reference = freeze(model, weights)
    wide = sum(t.numel() for n, t in reference.state_dict().items() if "layers" in n and t.element_size() > 1)
    assert len(stacks) == 4 and wide < before / 10
    assert not any(p.ndim == 3 for p in reference.parameters())
    near = score(reference, batch, models.config()).values
    assert 0 < abs(near - plain).mean() < most
    rounded = {f"{n}.weight" for n, m in reference.named_modules() if isinstance(m, NarrowLinear)} | stacks
    with torch.no_grad():  # the plain form: the same rounded weights, wide
        for n, p in model.named_parameters():
            if n in rounded:
                code, scale = encode(p, DTYPES[weights])
                p.copy_(code.float() * scale[..., None])
    np.testing.assert_allclose(near, score(model, batch, models.config()).values, atol=2e-4)


def test_a_reference_that_moves_cannot_have_8_bit_weights():
    config = Config(algorithm={"kl": {"coef": 0.1, "weights": "int8", "reset_every": 5}})
    assert any("algorithm.kl.weights is int8" in problem for problem in rules.problems(config))
