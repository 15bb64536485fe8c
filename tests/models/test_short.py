"""Attention of short packed sequences equals the plain form, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.models.attention import short
from tidemill.models.attention.packed import Packed, SharedPrompt
from tidemill.models.attention.registry import AttentionForm

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(short._library() is None, reason="no C compiler here")


def tensors(tokens: int, heads: int, kv_heads: int, dim: int, v_dim: int) -> list[torch.Tensor]:
    torch.manual_seed(tokens + dim)
    shapes = ((tokens, heads, dim), (tokens, kv_heads, dim), (tokens, kv_heads, v_dim))
    return [torch.randn(shape).requires_grad_() for shape in shapes]


def both(context, given: list[torch.Tensor], window: int | None = None, softcap: float | None = None):
    out = context.attend(0, *given, AttentionForm(given[0].shape[-1] ** -0.5, window, softcap))
    weights = torch.sin(torch.arange(out.numel(), dtype=out.dtype)).reshape(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), given)]


def assert_alike(ours, plain, given, **how) -> None:
    """The plain form computes in float64."""
    exact = [x.detach().double().requires_grad_() for x in given]
    for a, b in zip(both(ours, given, **how), both(plain, exact, **how), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=9),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (4, 4)]),
    dims=st.sampled_from([(48, 48), (16, 16), (20, 7), (1, 33), (64, 128)]),
)
def test_samples_one_after_another(lengths: list[int], heads: tuple[int, int], dims: tuple[int, int]) -> None:
    made = tensors(sum(lengths), *heads, *dims)
    assert_alike(short.packed(lengths, CPU), Packed(lengths, CPU), made)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    answers=st.lists(st.tuples(st.integers(0, 45), st.integers(0, 4)), min_size=1, max_size=12),
    dims=st.sampled_from([(48, 48), (20, 7)]),
)
def test_responses_that_share_prompts(
    prompts: list[int], answers: list[tuple[int, int]], dims: tuple[int, int]
) -> None:
    """In any order, some prompts without a response, some responses without an input token."""
    responses, group = [n for n, _ in answers], [g % len(prompts) for _, g in answers]
    made = tensors(sum(prompts) + sum(responses), 4, 2, *dims)
    ours, plain = short.shared(prompts, responses, group, CPU), SharedPrompt(prompts, responses, group, CPU)
    assert_alike(ours, plain, made)


@pytest.mark.parametrize("how", [{"window": 6}, {"softcap": 5.0}], ids=str)
def test_windows_and_caps_are_left_to_the_plain_form(how: dict) -> None:
    made = tensors(30, 4, 2, 16, 16)
    assert_alike(short.packed([20, 10], CPU), Packed([20, 10], CPU), made, **how)
    shared = ([10, 6], [8, 6], [0, 1], CPU)
    assert_alike(short.shared(*shared), SharedPrompt(*shared), made, **how)


def test_long_sequences_and_other_tensors_are_left_to_the_plain_form() -> None:
    lengths = [short.LONGEST + 1, 3]
    assert_alike(short.packed(lengths, CPU), Packed(lengths, CPU), tensors(sum(lengths), 2, 1, 8, 8))
    wide = [x.detach().double().requires_grad_() for x in tensors(12, 2, 1, 8, 8)]
    assert both(short.packed([12], CPU), wide)[0].dtype == torch.float64


def test_threads_change_no_bit() -> None:
    prompts, responses, group = [9] * 40, [13] * 160, [i % 40 for i in range(160)]
    made, context = tensors(40 * 9 + 160 * 13, 4, 2, 24, 24), short.shared(prompts, responses, group, CPU)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(both(context, made))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_nan_stays_in_its_family() -> None:
    made = tensors(30, 2, 1, 8, 8)
    with torch.no_grad():
        made[1][3] = float("nan")
    out, dq, dk, dv = both(short.packed([10, 20], CPU), made)
    assert out[3].isnan().all() and all(x[10:].isfinite().all() for x in (out, dq, dk, dv))
