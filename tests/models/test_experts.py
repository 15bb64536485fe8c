"""Grouped experts compute what transformers' plain loop does."""

import pytest
import torch
from tests.learn.parallel.models import gradients, model

from tidemill.models.layers import rowwise
from tidemill.models.mixture import experts

IDS = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(0))


def run(made, implementation):
    made.set_attn_implementation("eager")
    made.set_experts_implementation(implementation)
    logits = made(IDS, use_cache=False).logits
    logits.square().mean().backward()
    return logits.detach(), gradients(made)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_grouped_experts_equal_the_plain_loop(name):
    plain, ours = run(model(name), "eager"), run(model(name), experts.NAME)
    torch.testing.assert_close(ours[0], plain[0], atol=1e-5, rtol=1e-5)
    for parameter, grad in plain[1].items():
        torch.testing.assert_close(ours[1][parameter], grad, atol=1e-5, rtol=1e-4)


def test_groups_without_rows_get_a_gradient_of_zero():
    x, weights = torch.randn(5, 4, requires_grad=True), torch.randn(3, 2, 4, requires_grad=True)
    ends = experts.ends_of(torch.tensor([2, 0, 2, 2, 0]), 3)
    assert ends.tolist() == [2, 2, 5]
    out = experts.grouped(x, weights, ends)
    out.sum().backward()
    wanted = torch.cat([x[:2] @ weights[0].T, x[2:] @ weights[2].T])
    torch.testing.assert_close(out, wanted)
    assert torch.equal(weights.grad[1], torch.zeros(2, 4))
    torch.testing.assert_close(weights.grad[2], x[2:].sum(0).expand(2, 4))


def test_a_tokens_experts_give_the_same_bits_whatever_shares_its_batch():
    draw = torch.Generator().manual_seed(0)
    module = model("qwen3-moe").get_decoder().layers[0].mlp.experts
    x, weights = torch.randn(40, 32, generator=draw), torch.rand(40, 2, generator=draw)
    index = torch.rand(40, 8, generator=draw).topk(2).indices
    with torch.no_grad(), rowwise.mode(True, torch.device("cpu")):
        together = experts.forward(module, x, index, weights)
        for part in (slice(0, 1), slice(3, 10)):
            assert torch.equal(experts.forward(module, x[part], index[part], weights[part]), together[part])


def test_models_with_known_experts_are_plugged_and_others_left_alone():
    made, dense = model("mixtral"), model("qwen2")
    experts.plug(made)
    experts.plug(dense)
    assert made.config._experts_implementation == experts.NAME
    assert not any(experts.is_known(m) for m in dense.modules())
