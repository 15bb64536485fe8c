import pytest
import torch
from tests.learn.test_engine import CPU, SHAPE, config, samples

from tidemill.algorithms.registry import get
from tidemill.config import KL
from tidemill.learn.engine import Learner, freeze, score
from tidemill.models.load import make_tiny
from tidemill.models.narrow import NarrowLinear, encode


@pytest.mark.parametrize(("weights", "most"), [("int8", 1 / 254), ("fp8", 1 / 16)])
def test_a_rounded_weight_is_within_half_a_step_of_the_weight(weights, most):
    torch.manual_seed(0)
    weight = torch.randn(24, 40) * torch.logspace(-4, 2, 24)[:, None]
    code, scale = encode(weight, weights)
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


def test_a_reference_made_of_a_learners_model_scores_as_one_made_before():
    """A run freezes what the learner has prepared: on a CPU its layers run fused, and their weights then go."""
    early, late = (make_tiny(SHAPE, torch.float32, 0, CPU).model for _ in range(2))
    before = freeze(early, "int8")
    Learner(late, config(), get("grpo"), 1)
    found, wanted = (score(model, samples(), config()).values for model in (freeze(late, "int8"), before))
    assert abs(found - wanted).max() < 1e-5


def test_a_reference_that_moves_cannot_have_8_bit_weights():
    with pytest.raises(ValueError, match="reset_every"):
        KL(coef=0.1, weights="int8", reset_every=5)
