"""8-bit products against the same arithmetic written out, and against exact products."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from tests.learn.test_engine import CPU, config, samples
from tidemill.algorithms.shared.registry import get
from tidemill.errors import ModelError
from tidemill.learn import fp8, layers
from tidemill.learn.engine import Learner, freeze, score
from tidemill.learn.fp8 import FINE, WIDE, fp8_linear, product, quantized
from tidemill.models import parts
from tidemill.models.load import make_tiny
from tidemill.recipe.config import TinyModel

SHAPE = TinyModel(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=96, window=64)


def written_out(a: torch.Tensor, b: torch.Tensor, kind: torch.dtype, scaling: str) -> torch.Tensor:
    """Round each factor by itself, multiply exactly."""
    (a8, a_scale), (b8, b_scale) = quantized(a, kind, scaling), quantized(b, FINE, scaling)
    return ((a8.double() * a_scale) @ (b8.double() * b_scale).t()).float()


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("is_forward", [True, False])
def test_a_product_is_the_exact_product_of_rounded_factors(scaling, is_forward):
    torch.manual_seed(0)
    a, b = torch.randn(32, 64), torch.randn(48, 64)
    kind = WIDE if scaling == "tensorwise" and not is_forward else FINE
    torch.testing.assert_close(
        product(a, b, scaling, is_forward), written_out(a, b, kind, scaling), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_linear_layers_output_and_gradients_are_near_the_exact_ones(scaling):
    torch.manual_seed(0)
    x, w, bias = (torch.randn(*s, requires_grad=True) for s in ((3, 7, 64), (48, 64), (48,)))
    grad = torch.randn(3, 7, 48)
    exact = torch.autograd.grad(torch.nn.functional.linear(x, w, bias), (x, w, bias), grad)
    out = fp8_linear(x, w, bias, scaling)
    for ours, wanted in zip((out, *torch.autograd.grad(out, (x, w, bias), grad)), (x @ w.t() + bias, *exact)):
        assert ours.shape == wanted.shape
        assert (ours - wanted).norm() / wanted.norm() < 0.09  # e5m2, the coarser, has two bits of fraction


def test_with_a_scale_per_row_an_outlier_costs_its_own_row_alone():
    torch.manual_seed(0)
    a, b = torch.randn(32, 64), torch.randn(48, 64)
    a[0] *= 1e4
    gap = {
        s: ((product(a, b, s, True) - a @ b.t())[1:].norm() / (a @ b.t())[1:].norm()) for s in ("tensorwise", "rowwise")
    }
    assert gap["rowwise"] < 0.05 < gap["tensorwise"]


def test_zeros_stay_zeros():
    assert not product(torch.zeros(16, 16), torch.zeros(16, 16), "rowwise").any()


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_learner_with_8_bit_products_goes_the_plain_learners_way(scaling):
    found = []
    for kind in ("none", scaling):
        model = make_tiny(SHAPE, torch.float32, 0, CPU).model
        learner = Learner(model, config(learn={"fp8": kind}), get("grpo"), 1)
        learner.accumulate(samples())
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert not torch.equal(*found)
    assert torch.nn.functional.cosine_similarity(*found, dim=0) > 0.98


@pytest.mark.parametrize("dora", [False, True])
def test_a_frozen_weights_products_are_8_bit_beside_an_adapter(dora):
    found, outs = [], []
    for kind in ("none", "rowwise"):
        model = make_tiny(SHAPE, torch.float32, 0, CPU).model
        learner = Learner(model, config(learn={"fp8": kind, "lora_rank": 4, "dora": dora}), get("grpo"), 1)
        learner.accumulate(samples())
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        outs.append(score(freeze(model), samples(), config()).values)  # adapters off: the reference is exact
        layers.undo(model)
        assert not any("multiply" in m.__dict__ for m in model.modules())
    assert not torch.equal(*found)
    assert torch.nn.functional.cosine_similarity(*found, dim=0) > 0.98
    assert abs(outs[0] - outs[1]).max() < 1e-5


def test_a_model_without_a_layer_that_fits_is_refused():
    model = make_tiny(
        TinyModel(hidden=24, layers=1, heads=2, kv_heads=2, intermediate=40, window=64), torch.float32, 0, CPU
    )
    with pytest.raises(ModelError, match="multiples of 16"):
        layers.prepare(model.model, config(learn={"fp8": "rowwise"}).learn)


def test_layers_whose_sides_do_not_fit_are_left_alone_and_all_can_be_undone():
    model = make_tiny(SHAPE, torch.float32, 0, CPU).model
    model.get_decoder().layers[0].mlp.down_proj = torch.nn.Linear(90, 64)
    assert fp8.attach(parts.layers_of(model), "rowwise") == 13
    layers.undo(model)
    assert not any("forward" in m.__dict__ for m in model.modules())


@pytest.mark.slow
def test_compiled_layers_call_8_bit_products_as_they_are(scaling="rowwise"):
    found = []
    for is_compiled in (False, True):
        model = make_tiny(SHAPE, torch.float32, 0, CPU).model
        learner = Learner(model, config(learn={"fp8": scaling, "recompute": "mlp"}), get("grpo"), 1)
        if is_compiled:
            layers.compile_layers(model, backend="aot_eager_decomp_partition")
        learner.accumulate(samples())
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        layers.undo(model)
    plain, compiled = found
    # As a whole: rounding of the last bit may send a single element to the next of 256 steps.
    assert (plain - compiled).norm() < 1e-3 * plain.norm()


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_compiler_sees_the_rounding_and_not_the_products(scaling):
    """Inside an operator is the product alone: the rest is the compiler's to join with its neighbours."""
    seen: set[str] = set()

    def look(graph, inputs):
        seen.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    x, w = (torch.randn(*s, requires_grad=True) for s in ((7, 32), (16, 32)))
    plain = fp8_linear(x, w, None, scaling)
    wanted = torch.autograd.grad(plain.square().sum(), (x, w))
    compiled = torch.compile(
        lambda x, w: fp8_linear(x, w, None, scaling), backend=aot_autograd(fw_compiler=look, bw_compiler=look)
    )
    out = compiled(x, w)
    found = torch.autograd.grad(out.square().sum(), (x, w))
    for ours, theirs in zip((out, *found), (plain, *wanted)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert {"tidemill.fp8_linear.default", "tidemill.fp8_product.default", "aten.amax.default"} <= seen
