"""The gated delta rule in chunks over packed rows is the rule token by token, and the layer is transformers' own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from benchmarks import _families_tiny as tiny
from torch import Tensor

from tidemill.models.recurrent.chunked import layer
from tidemill.models.recurrent.chunked.conv import convolved
from tidemill.models.recurrent.chunked.plan import CHUNK, RowPlan, Segment
from tidemill.models.recurrent.chunked.rule import gated_delta, inverse_of_unit_lower
from tidemill.models.recurrent.states import State, States

CPU = torch.device("cpu")
PLANS = {
    "alone": [Segment(3), Segment(CHUNK), Segment(1), Segment(2 * CHUNK + 5)],
    "shared": [Segment(70), Segment(2), Segment(9, parent=0), Segment(CHUNK + 1, parent=0), Segment(1, parent=1)],
    "given": [Segment(5, given=1), Segment(CHUNK + 3), Segment(1, given=0), Segment(2)],
    "empty": [Segment(4), Segment(0, parent=0), Segment(3, parent=0)],
}


def plain(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token."""
    out = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        change = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * beta[t][:, None]
        state = state + k[t][:, :, None] * change[:, None, :]
        out.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return (torch.stack(out) if out else v[:0]), state


def by_segments(segments: list[Segment], run: Any, zero: Any, given: list[Any]) -> Tensor:
    """What `run(first, last, state)` gives of each segment, from what it begins with."""
    at, parts, ends = 0, [], []
    for s in segments:
        begins = ends[s.parent] if s.parent >= 0 else given[s.given] if s.given >= 0 else zero
        out, end = run(at, at + s.length, begins)
        at += s.length
        parts.append(out)
        ends.append(end)
    return torch.cat(parts)


def inputs(tokens: int, heads: int = 2, dk: int = 16, dv: int = 32) -> list[Tensor]:
    torch.manual_seed(tokens)
    q, k = (F.normalize(torch.randn(tokens, heads, dk), dim=-1) for _ in range(2))
    g = -torch.rand(tokens, heads) * 0.3
    made = [q, k, torch.randn(tokens, heads, dv), g, torch.rand(tokens, heads)]
    return [x.double().float().requires_grad_() for x in made]


@pytest.mark.parametrize("name", PLANS)
def test_the_rule_and_its_gradients(name: str) -> None:
    segments = PLANS[name]
    plan, given = RowPlan(segments, CPU), torch.randn(2, 2, 16, 32).requires_grad_()
    made = inputs(plan.tokens)
    out, _ = gated_delta(*made, plan, given)
    wanted = by_segments(
        segments, lambda a, b, s: plain(*(x[a:b] for x in made), s), torch.zeros(2, 16, 32), list(given)
    )
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)
    weights = torch.randn_like(out)
    used = [*made, given] if name == "given" else made
    ours = torch.autograd.grad((out * weights).sum(), used)
    theirs = torch.autograd.grad((wanted * weights).sum(), used)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, atol=3e-5, rtol=1e-3)


@pytest.mark.parametrize("name", PLANS)
def test_the_convolution_and_its_gradients(name: str) -> None:
    segments, width = PLANS[name], 4
    plan = RowPlan(segments, CPU)
    before = (width - 1) * (1 + max(s.given for s in segments))
    x = torch.randn(before + plan.tokens, 5).requires_grad_()
    weight = torch.randn(5, width).requires_grad_()

    def run(a: int, b: int, past: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.cat([past, x[before + a : before + b]])
        if a == b:
            return x[:0], past
        out = F.conv1d(whole.t()[None], weight[:, None], groups=5)[0].t()
        return out, whole[-(width - 1) :]

    given = [x[i * (width - 1) : (i + 1) * (width - 1)] for i in range(before // (width - 1))]
    wanted = by_segments(segments, run, torch.zeros(width - 1, 5), given)
    out = convolved(x, weight, None, plan.taps(width))
    torch.testing.assert_close(out, wanted)
    weights = torch.randn_like(out)
    ours = torch.autograd.grad((out * weights).sum(), [x, weight])
    theirs = torch.autograd.grad((wanted * weights).sum(), [x, weight])
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_the_inverse_and_its_gradient() -> None:
    a = torch.randn(3, 2, CHUNK, CHUNK).tril(-1).mul(0.2).requires_grad_()
    one = torch.eye(CHUNK)
    torch.testing.assert_close(inverse_of_unit_lower(a) @ (a + one), one.expand_as(a), atol=1e-4, rtol=1e-4)
    weights = torch.randn_like(a)
    (ours,) = torch.autograd.grad((inverse_of_unit_lower(a) * weights).sum(), a)
    (theirs,) = torch.autograd.grad((torch.linalg.inv(a + one) * weights).sum(), a)
    torch.testing.assert_close(ours, theirs.tril(-1), atol=1e-2, rtol=1e-3)


def module_of(family: str) -> Any:
    found = [m for m in tiny.models(family)[1].modules() if layer.is_known(m)]
    return found[0]


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
@pytest.mark.parametrize("name", PLANS)
def test_the_layer_is_transformers_own(family: str, name: str) -> None:
    module, segments = module_of(family), PLANS[name]
    plan, x = RowPlan(segments, CPU), torch.randn(sum(s.length for s in segments), 32)

    def run(a: int, b: int, state: State) -> tuple[Tensor, State]:
        states = States({key: one.clone() for key, one in state.items()})
        if a == b:
            return x[a:b], state
        return module(x[None, a:b], cache_params=states)[0], states.now

    with torch.no_grad():
        begun = [run(0, n, {})[1] for n in (2, 7)]
        wanted = by_segments(segments, run, {}, begun)
        given = None
        if name == "given":
            given = {key: torch.cat([one[key] for one in begun]) for key in begun[0]}
        out, ends = layer.forward(module, x, plan, given)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)
    first = segments[0]
    _, end = run(0, first.length, begun[first.given] if first.given >= 0 else {})
    torch.testing.assert_close(ends[layer.DELTA_STATE][:1], end[layer.DELTA_STATE], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ends[layer.CONV_STATE][:1, :, 1:], end[layer.CONV_STATE][..., 1:])


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_one_token_of_each_of_many_sequences(family: str) -> None:
    module = module_of(family)
    torch.manual_seed(0)
    slots = torch.tensor([3, 0, 4], dtype=torch.int32)
    with torch.no_grad():
        begun = []
        for n in (2, 9, 5):
            states = States()
            module(torch.randn(1, n, 32), cache_params=states)
            begun.append(states.now)
        conv = torch.full((6, *begun[0][layer.CONV_STATE].shape[1:]), 9.0)
        delta = torch.full((6, *begun[0][layer.DELTA_STATE].shape[1:]), 9.0)
        for slot, one in zip(slots.tolist(), begun):
            conv[slot], delta[slot] = one[layer.CONV_STATE][0], one[layer.DELTA_STATE][0]
        for _ in range(3):
            x = torch.randn(3, 32)
            out = layer.step(module, x, conv, delta, slots)
            for i, one in enumerate(begun):
                states = States(one)
                wanted = module(x[None, i : i + 1], cache_params=states)[0, 0]
                begun[i] = states.now
                torch.testing.assert_close(out[i], wanted, atol=1e-5, rtol=1e-4)
                torch.testing.assert_close(delta[slots[i]], states.now[layer.DELTA_STATE][0], atol=1e-5, rtol=1e-4)
    assert (delta[[1, 2, 5]] == 9.0).all() and (conv[[1, 2, 5]] == 9.0).all()


def test_plans_of_random_rows_place_every_token_once() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        prompts = rng.integers(1, 150, int(rng.integers(1, 4))).tolist()
        responses = rng.integers(0, 150, int(rng.integers(0, 6))).tolist()
        plan = RowPlan.shared(prompts, responses, rng.integers(0, len(prompts), len(responses)).tolist(), CPU)
        places = plan.gather[plan.gather < plan.tokens]
        assert sorted(places.tolist()) == list(range(plan.tokens))
        assert torch.equal(plan.gather[plan.scatter], torch.arange(plan.tokens))
