"""Sampled tokens follow the distribution they claim to."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.rollout.tiny import kept_chances, roll, tiny_model

from tidemill.rollout.engine import Request, Sampling
from tidemill.rollout.native.draw.sampling import Draw, draw, stream_key
from tidemill.rollout.native.engine import NativeEngine

ROWS = 40_000


def chi_square_excess(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """How many standard deviations the statistic lies above its mean (k degrees of freedom: mean k, variance 2k)."""
    expected = probabilities * counts.sum()
    is_common = expected >= 5
    rest, rest_expected = counts[~is_common].sum(), expected[~is_common].sum()
    statistic = ((counts - expected)[is_common] ** 2 / expected[is_common]).sum()
    if rest_expected > 0:
        statistic += (rest - rest_expected) ** 2 / rest_expected
    freedom = is_common.sum() - 1 + (rest_expected > 0)
    return float((statistic - freedom) / math.sqrt(2 * freedom))


def draw_many(logits: torch.Tensor, **how: object) -> tuple[np.ndarray, torch.Tensor, torch.Tensor | None]:
    key = torch.tensor([stream_key(0, 1, i) for i in range(ROWS)])
    drawn = draw(logits.expand(ROWS, -1), Draw(key, torch.zeros(ROWS, dtype=torch.int64), **how))  # type: ignore[arg-type]
    return np.bincount(drawn.tokens.numpy(), minlength=logits.shape[-1]), drawn.logprobs, drawn.kept


def test_tokens_follow_the_softmax_at_the_temperature() -> None:
    torch.manual_seed(0)
    logits = torch.randn(50) * 2
    counts, _, _ = draw_many(logits, temperature=torch.full((ROWS,), 0.7))
    wanted = torch.softmax(logits / 0.7, -1).double().numpy()
    assert chi_square_excess(counts, wanted) < 4
    assert chi_square_excess(counts, torch.softmax(logits, -1).double().numpy()) > 50  # the test can fail


@pytest.mark.parametrize(
    "cut", [{"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.8, "min_p": 0.05}], ids=str
)
def test_truncated_tokens_follow_the_kept_part_and_its_mass_is_recorded(cut: dict[str, float]) -> None:
    torch.manual_seed(1)
    logits = torch.randn(50) * 2
    p = torch.softmax(logits, -1).double().numpy()
    wanted = kept_chances(p, cut)
    counts, _, kept = draw_many(
        logits,
        truncated=torch.arange(ROWS),
        top_k=torch.full((ROWS,), int(cut.get("top_k", 50))),
        top_p=torch.full((ROWS,), cut.get("top_p", 2.0)),
        min_p=torch.full((ROWS,), cut.get("min_p", 0.0)),
    )
    assert counts[wanted == 0].sum() == 0
    assert chi_square_excess(counts, wanted) < 4
    assert kept is not None
    np.testing.assert_allclose(kept.numpy(), math.log(p[wanted > 0].sum()), atol=1e-5)


@pytest.mark.parametrize("cut", [{"top_k": 2}, {"top_p": 0.4}, {"min_p": 1.0}], ids=str)
def test_equally_likely_tokens_are_kept_or_cut_together(cut: dict[str, float]) -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0, 0.5])
    counts, _, kept = draw_many(
        logits,
        truncated=torch.arange(ROWS),
        top_k=torch.full((ROWS,), int(cut.get("top_k", 6))),
        top_p=torch.full((ROWS,), cut.get("top_p", 2.0)),
        min_p=torch.full((ROWS,), cut.get("min_p", 0.0)),
    )
    assert set(np.flatnonzero(counts)) == {1, 3, 4} and kept is not None
    assert chi_square_excess(counts, np.array([0, 1, 0, 1, 1, 0]) / 3) < 4
    np.testing.assert_allclose(kept.numpy(), torch.softmax(logits, -1)[[1, 3, 4]].sum().log().item(), atol=1e-6)


@pytest.mark.parametrize("kernels", [True, False])
def test_whole_sequences_follow_the_model(kernels: bool) -> None:
    """Pairs of first and second tokens of many samples against the model's own joint distribution."""
    model = tiny_model("qwen3")
    prompt, allowed = [5, 6, 7], tuple(range(10, 18))
    with torch.no_grad():
        firsts = torch.log_softmax(_logits(model, [prompt])[:, list(allowed)], -1)[0]
        seconds = torch.log_softmax(_logits(model, [[*prompt, a] for a in allowed])[:, list(allowed)], -1)
    wanted = (firsts.unsqueeze(1) + seconds).exp().double().numpy().ravel()
    engine = NativeEngine(model, eos_ids=[], max_seqs=500, max_len=32, kernels=kernels)
    how = Sampling(max_tokens=2, allowed_tokens=allowed, ignore_eos=True)
    done = roll(engine, [Request(0, prompt, how, n=6000)])
    pairs = np.array([[allowed.index(t) for t in c.tokens] for c in done.values()])
    counts = np.bincount(pairs[:, 0] * len(allowed) + pairs[:, 1], minlength=len(allowed) ** 2)
    assert chi_square_excess(counts, wanted) < 4


def _logits(model: torch.nn.Module, prompts: list[list[int]]) -> torch.Tensor:
    model.set_attn_implementation("eager")  # type: ignore[operator]
    try:
        return model(input_ids=torch.tensor(prompts), use_cache=False).logits[:, -1].float()
    finally:
        model.set_attn_implementation("tidemill")  # type: ignore[operator]


def test_with_truncation_the_mean_importance_ratio_is_one() -> None:
    """Tokens drawn from policy a, weighed for policy b: E[b(x) / a(x)] = 1 when both are normed over what was kept; the
    plain ratio, without the kept mass, is not."""
    torch.manual_seed(2)
    a = torch.randn(40) * 2
    b = a + torch.randn(40) * 0.3
    cut = {"top_k": torch.full((ROWS,), 10), "top_p": torch.full((ROWS,), 2.0), "min_p": torch.zeros(ROWS)}
    key = torch.tensor([stream_key(3, 1, i) for i in range(ROWS)])
    how = Draw(key, torch.zeros(ROWS, dtype=torch.int64), truncated=torch.arange(ROWS), **cut)  # type: ignore[arg-type]
    drawn = draw(a.expand(ROWS, -1), how)
    assert drawn.kept is not None
    new = torch.log_softmax(b, -1)
    kept_now = new[a.topk(10).indices].logsumexp(-1)
    plain = (new[drawn.tokens] - drawn.logprobs).exp().mean().item()
    fair = (new[drawn.tokens] - kept_now - (drawn.logprobs - drawn.kept)).exp().mean().item()
    assert abs(fair - 1) < 0.01
    assert abs(plain - 1) > 2 * abs(fair - 1)


def test_stop_strings_end_a_sample_with_the_token_that_completes_them() -> None:
    class Letters:
        def decode(self, tokens: list[int]) -> str:
            return "".join(chr(ord("a") + t % 5) for t in tokens)

    engine = NativeEngine(tiny_model("qwen3"), eos_ids=[], max_seqs=32, max_len=64, tokenizer=Letters())
    done = roll(engine, [Request(0, [5, 6], Sampling(max_tokens=40, stop_strings=("ab", "cd")), n=32)])
    texts = [Letters().decode(c.tokens) for c in done.values()]
    assert any(c.finish == "stop" for c in done.values())
    for text, completion in zip(texts, done.values()):
        if completion.finish == "stop":
            assert text.endswith(("ab", "cd"))
            text = text[:-1]
        assert "ab" not in text and "cd" not in text
